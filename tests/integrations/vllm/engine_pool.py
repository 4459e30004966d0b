"""Runs the scenarios of ``engine.py`` side by side, a process each, spread over the visible GPUs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LONGEST = ("lora",)
"""Scenarios that take longer than any other, longest first."""
LIMIT, TAIL, PORTS = 580, 6000, 32
"""Seconds of a scenario, characters of its output that a failure shows, ports that it has to itself."""


class Scenario(NamedTuple):
    """A function of ``engine.py`` and what it is told: pipeline and tensor size, base format."""

    name: str
    pp: int = 1
    tp: int = 1
    base: str = ""

    @property
    def gpus(self) -> int:
        return self.pp * self.tp

    @property
    def label(self) -> str:
        sizes = [f"{n}{v}" for n, v in (("pp", self.pp), ("tp", self.tp)) if v > 1]
        return "-".join(filter(None, [self.name, self.base, *sizes]))


class Outcome(NamedTuple):
    """How a scenario's process ended; ``error`` is empty when it wrote a result."""

    error: str
    result: Path


def declared(item) -> list[Scenario]:
    """The scenarios of a test's ``engines`` mark, in its order; a bare name is a scenario without options."""
    mark = item.get_closest_marker("engines")
    return [Scenario(a) if isinstance(a, str) else a for a in (mark.args if mark else ())]


def needed(items: Iterable, path: Path) -> list[Scenario]:
    """What the tests of the module at ``path`` among ``items`` need, once each."""
    return list(dict.fromkeys(s for item in items if item.path == path for s in declared(item)))


def in_order(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Longest first, then those of several GPUs, then as declared."""
    late = len(LONGEST)
    return sorted(scenarios, key=lambda s: (LONGEST.index(s.name) if s.name in LONGEST else late, -s.gpus))


def least_busy(gpus: Sequence[str], busy: Iterable[str], count: int) -> list[str]:
    """``count`` of ``gpus`` with the fewest running; ``busy`` names a GPU once for each process on it."""
    running = list(busy)
    return sorted(gpus, key=running.count)[:count]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; all of a run's, also in a worker of pytest-xdist that keeps to one."""
    import torch

    if every := os.environ.get("BEAM_MOE_TEST_GPUS"):  # from tests/conftest.py
        return every.split(",")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if named is None else named.split(",")
    return [n.strip() for n in names if n.strip()][: torch.cuda.device_count()]


def engine_command(scenario: Scenario, folder: Path) -> list[str]:
    return [sys.executable, "-P", str(HERE / "engine.py"), scenario.name, str(folder)]


class _Running(NamedTuple):
    process: subprocess.Popen
    gpus: list[str]
    lock: int
    start: float


class Pool:
    """At most ``jobs`` processes at a time, started from a thread; `outcome` waits for one.

    Several pools may share ``folder``, as workers of pytest-xdist do: a scenario runs once, under a lock.

    Args:
        gpus: what CUDA_VISIBLE_DEVICES of a process may name.
        jobs: most processes at a time.
        folder: for checkpoints, results and locks.
        logs: for ``LABEL.log``, the output of each, and ``engines.txt``, a line for each.
        command: of a scenario, given its own folder, into which it writes NAME.json.
        limit: seconds of one process.
        worker: number of this pool among those that share the folder; keeps their ports and GPUs apart.
    """

    def __init__(
        self, gpus: Sequence[str], jobs: int, folder: Path, logs: Path,
        command: Callable[[Scenario, Path], list[str]] = engine_command, limit: float = LIMIT, worker: int = 0,
    ) -> None:  # fmt: skip
        turn = worker % max(1, len(gpus))
        self.gpus, self.jobs, self.folder, self.logs = [*gpus[turn:], *gpus[:turn]], max(1, jobs), folder, logs
        self.command, self.limit, self.port = command, limit, 20000 + worker * 1024
        self.outcomes: dict[Scenario, Future[Outcome]] = {}
        self.waiting: list[Scenario] = []
        self.running: dict[Scenario, _Running] = {}
        self.changed = threading.Condition()
        self.stopped = False
        for f in (folder, logs):
            f.mkdir(parents=True, exist_ok=True)
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def add(self, scenarios: Iterable[Scenario]) -> None:
        """Run each of ``scenarios`` that is new, unless there are too few GPUs for it."""
        with self.changed:
            new = [s for s in dict.fromkeys(scenarios) if s not in self.outcomes and s.gpus <= len(self.gpus)]
            self.outcomes |= {s: Future() for s in new}
            self.waiting = in_order([*self.waiting, *new])
            self.changed.notify_all()

    def outcome(self, scenario: Scenario) -> Outcome:
        """Wait for a scenario that was added."""
        return self.outcomes[scenario].result()

    def stop(self) -> None:
        """End every process with its children; what has not ended before has failed."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self.thread.join()

    def _loop(self) -> None:
        try:
            while True:
                with self.changed:
                    if self.stopped:
                        return
                    for scenario in list(self.waiting):
                        if len(self.running) < self.jobs:
                            self._start(scenario)
                    for scenario in list(self.running):
                        self._look_after(scenario)
                    self.changed.wait(0.2 if self.waiting or self.running else None)
        except BaseException as error:
            for future in self.outcomes.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            self.stopped = True
            for run in self.running.values():
                _kill(run.process)
            for future in self.outcomes.values():
                if not future.done():
                    future.set_result(Outcome("interrupted", Path()))

    def _start(self, scenario: Scenario) -> None:
        lock = os.open(self.folder / f"{scenario.label}.lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another pool is at it: look again later
            os.close(lock)
            return
        self.waiting.remove(scenario)
        if known := os.pread(lock, 1 << 20, 0):
            os.close(lock)
            error, path = json.loads(known)
            self.outcomes[scenario].set_result(Outcome(error, Path(path)))
            return
        busy = [g for run in self.running.values() for g in run.gpus]
        gpus = least_busy(self.gpus, busy, scenario.gpus)
        work = self.folder / scenario.label
        work.mkdir(exist_ok=True)
        env = {
            **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_PORT": str(self.port),
            "BEAM_MOE_TEST_PP": str(scenario.pp), "BEAM_MOE_TEST_TP": str(scenario.tp),
            "BEAM_MOE_TEST_BASE": scenario.base, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        env.pop("TRITON_INTERPRET", None)
        if self.jobs > 1:
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
        self.port += PORTS
        with open(self._log(scenario), "w") as log:
            process = subprocess.Popen(
                self.command(scenario, work), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.running[scenario] = _Running(process, gpus, lock, time.monotonic())

    def _look_after(self, scenario: Scenario) -> None:
        run = self.running[scenario]
        took, code = time.monotonic() - run.start, run.process.poll()
        if code is None and took < self.limit:
            return
        _kill(run.process)  # also children that a dead process left
        del self.running[scenario]
        ended = f"took over {self.limit} s" if code is None else f"ended with {code}"
        line = f"{scenario.label} {ended}, {took:.0f} s on GPU {','.join(run.gpus)}"
        with open(self._log(scenario), "a") as log, open(self.logs / "engines.txt", "a") as table:
            log.write(f"\n{line}\n")
            table.write(f"{line}\n")
        result = self.folder / scenario.label / f"{scenario.name}.json"
        error = ""
        if code != 0 or not result.exists():
            error = f"{line}\n{self._log(scenario).read_text(errors='replace')[-TAIL:]}"
        os.pwrite(run.lock, json.dumps([error, str(result)]).encode(), 0)
        os.close(run.lock)
        self.outcomes[scenario].set_result(Outcome(error, result))

    def _log(self, scenario: Scenario) -> Path:
        return self.logs / f"{scenario.label}.log"


def _kill(process: subprocess.Popen) -> None:
    """End a process and all of its session that is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
