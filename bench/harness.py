"""One timing method and one result format for every bench in this folder.

A time is the median over replays of one CUDA graph that holds many calls on rotated operand sets, so that launches
cost what they cost inside an engine's decode graph and no operand is still in L2 when its turn comes again. Competing
providers are replayed in turn, so that clocks and neighbours disturb all of them alike. A provider whose result is
wrong has no time.

Rows live in ``bench/results/<device>/<bench>.json``, one JSON object per line of one array, keyed by ``case``. Set
``BEAM_MOE_RESULTS`` to write to another folder, and ``BEAM_MOE_COMMIT`` where the sources travel without their git
directory.

    python bench/harness.py FILE...      # merge result files brought from another machine into bench/results
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

import triton
import triton.language as tl

from beam_moe.kernels.tuning import device_folder, device_name
from beam_moe.testing import error_ratio

START = time.monotonic()

ROOT = Path(__file__).resolve().parents[1]
H200_READ_TB_S = 4.42  # what targets for an NVIDIA H200 were set with; no floor here assumes less
L2_MULTIPLE = 4  # one turn through the operand sets reads at least this many times the L2

Calls = Sequence[Callable[[], object]]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    for name in ("beam-moe", "vllm", "megatron-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
            found["driver"] = (done.stdout.split() or ["unknown"])[0]
        except (OSError, subprocess.TimeoutExpired):
            found["driver"] = "unknown"
    return found


@functools.cache
def commit() -> str:
    """Short hash of the sources, with ``-dirty`` when anything but results differs from it."""
    if given := os.environ.get("BEAM_MOE_COMMIT"):
        return given

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=ROOT)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!README.md")
    return f"{head}-dirty" if head and changed else head or "unknown"


def fingerprint() -> dict:
    """What a row needs to be judged later: device, versions, commit and the day."""
    return {
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


# --- ceilings of this device, measured in this process


@triton.jit
def read_kernel(src_ptr, sink_ptr, blocks, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr = False):
    """Grid (programs,): each program sums every grid-th run of UNROLL blocks of 32-bit words and stores one sum.

    PDL: for launches that overlap, as the package's do.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK,), dtype=tl.int32)
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        base = src_ptr + block * (BLOCK * UNROLL)
        for i in tl.static_range(UNROLL):
            acc += tl.load(base + i * BLOCK + lane)
    tl.store(sink_ptr + tl.program_id(0), tl.sum(acc))


def _event_us(call: Callable[[], object], rounds: int) -> float:
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:]))


@functools.cache
def ceilings(gigabytes: float = 4.0) -> dict[str, float]:
    """``read_tb_s`` and ``copy_tb_s`` (bytes read plus written), over buffers of ``gigabytes``; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    words = int(gigabytes * 2**28)
    src = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.empty(sms * 32, dtype=torch.int32, device="cuda")
    best = 0.0
    for block, unroll, warps, per_sm in (
        (4096, 2, 8, 4),
        (2048, 4, 4, 8),
        (4096, 4, 8, 4),
        (2048, 2, 4, 16),
        (8192, 1, 8, 8),
    ):
        grid, blocks = (sms * per_sm,), words // (block * unroll)
        us = _event_us(
            lambda g=grid, n=blocks, b=block, u=unroll, w=warps: read_kernel[g](
                src, sink, n, BLOCK=b, UNROLL=u, num_warps=w
            ),
            9,
        )
        best = max(best, blocks * block * unroll * 4 / us / 1e6)
    dst = torch.empty_like(src)
    copy_us = _event_us(lambda: dst.copy_(src), 9)
    return {"read_tb_s": round(best, 3), "copy_tb_s": round(2 * words * 4 / copy_us / 1e6, 3)}


def floor_tb_s() -> float:
    """The bandwidth of every floor: what this process measured, on an H200 (or without a GPU) at least 4.42 TB/s."""
    measured = ceilings().get("read_tb_s", 0.0)
    return measured if measured and "H200" not in device_name() else max(H200_READ_TB_S, measured)


def copies_for(bytes_of_one: int, most: int = 64) -> int:
    """How many operand sets, each of ``bytes_of_one`` really read, keep each set out of L2 until its next turn."""
    if not torch.cuda.is_available():
        return 1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, -(-L2_MULTIPLE * l2 // max(bytes_of_one, 1))))


# --- timing


class _Replay:
    """A CUDA graph of ``calls`` repeated until one replay takes about ``target_us``."""

    def __init__(self, calls: Calls, target_us: float, most_calls: int = 96):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            once = max(begin.elapsed_time(end) * 1e3, 1.0)
            repeat = max(1, min(int(target_us / once) + 1, most_calls // len(calls)))
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            gc.disable()  # a collection that frees another graph would break this capture
            self.graph.capture_begin()
            try:
                for _ in range(repeat):
                    for call in calls:
                        call()
            finally:
                self.graph.capture_end()
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        self.count = repeat * len(calls)


def _summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)

    def at(q: float) -> float:
        return round(ordered[min(int(q * len(ordered)), len(ordered) - 1)], 2)

    return {"us": round(statistics.median(ordered), 2), "us_p20": at(0.2), "us_p80": at(0.8)}


def time_many_us(providers: dict[str, Calls], rounds: int = 15, target_ms: float = 3.0) -> dict[str, dict[str, float]]:
    """Time several providers in turn: median, 20th and 80th percentile of one call, in microseconds.

    Each provider is a list of calls: the same operation on rotated operand sets (see `copies_for`). Without a GPU the
    first call of each is timed on the host clock, which says nothing about kernels.
    """
    if not torch.cuda.is_available():
        host: dict[str, dict[str, float]] = {}
        for name, calls in providers.items():
            samples = []
            for _ in range(3):
                start = time.perf_counter()
                calls[0]()
                samples.append((time.perf_counter() - start) * 1e6)
            host[name] = _summary(samples)
        return host
    replays = {name: _Replay(calls, target_ms * 1e3) for name, calls in providers.items()}
    for _ in range(2):
        for replay in replays.values():
            replay.graph.replay()
    # Enqueued without a pause: the gap between an event and a graph that starts on an idle stream is not kernel time.
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay.graph.replay()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: _summary([b.elapsed_time(e) * 1e3 / replays[name].count for b, e in pairs])
        for name, pairs in marks.items()
    }


def time_us(calls: Calls, rounds: int = 15, target_ms: float = 3.0) -> dict[str, float]:
    """`time_many_us` of a single provider: ``{"us", "us_p20", "us_p80"}``."""
    return time_many_us({"only": calls}, rounds, target_ms)["only"]


def kernel_us(calls: Calls, replays: int = 4) -> dict[str, float]:
    """Microseconds of one call by kernel name, by the profiler over graph replays; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    replay = _Replay(calls, 1000.0)
    replay.graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(replays):
            replay.graph.replay()
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    total: dict[str, float] = {}
    for event in events:
        total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us()
    return {name: round(us / (replays * replay.count), 2) for name, us in total.items()}


# --- compiling ahead


def compile_pool(jobs: int = -1) -> ProcessPoolExecutor:
    """Processes that launch what is timed later, for Triton's cache on disk: one compiler keeps one core busy.

    ``jobs`` -1 leaves four cores of the machine free, up to 12 processes.
    """
    if jobs < 0:
        jobs = max(1, min(12, (os.cpu_count() or 4) - 4))
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def say(text: str) -> None:
    """A line of progress, with the seconds since the process began."""
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def complain(name: str, failure: Exception) -> None:
    """What failed and why, on one line: a run goes on without it."""
    print(f"{name}: {type(failure).__name__}: {failure}"[:400].replace("\n", " "), file=sys.stderr, flush=True)


def compile_ahead(jobs: int, work: Sequence[tuple], seconds: float = 60.0) -> None:
    """Run ``work`` (function and arguments) in `compile_pool`'s processes, for at most ``seconds``.

    What is not compiled by then, or fails here, compiles when its turn comes.
    """
    if not jobs or not work:
        return
    pool = compile_pool(jobs)
    futures = [pool.submit(*item) for item in work]
    done = 0
    try:
        for future in as_completed(futures, timeout=seconds):
            if future.exception() is not None:
                complain("compiling ahead", future.exception())
            done += 1
            if done % 8 == 0:
                say(f"compiling: {done} of {len(work)} parts")
    except TimeoutError:
        pass
    if done < len(work):  # what still compiles or launches would disturb the times
        for process in list((pool._processes or {}).values()):
            process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    say(f"compiled {done} of {len(work)} parts")


# --- gate, rows, tables


class WrongResult(RuntimeError):
    """A provider's result left its reference by more than the limit; it gets no time."""


def gate(name: str, reference: torch.Tensor, got: torch.Tensor, limit: float) -> float:
    """Return the error ratio of ``got``, or raise `WrongResult` when it exceeds ``limit`` or is not finite."""
    ratio = error_ratio(reference, got) if reference.shape == got.shape else float("nan")
    if not ratio <= limit:
        raise WrongResult(f"{name}: error ratio {ratio:.2e} against a limit of {limit:.0e}")
    return ratio


def results_path(bench: str) -> Path:
    root = Path(os.environ.get("BEAM_MOE_RESULTS") or ROOT / "bench" / "results")
    return root / device_folder() / f"{bench}.json"


def read_rows(path: Path) -> list[dict]:
    return json.loads(path.read_text()) if path.is_file() else []


def _merge(path: Path, rows: Iterable[dict]) -> None:
    merged = {row["case"]: row for row in read_rows(path)}
    for row in rows:
        merged[row["case"]] = row
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n")


def write_rows(bench: str, rows: Sequence[dict]) -> Path:
    """Merge ``rows`` (each with a ``case``) into this device's file of ``bench``; the same case is replaced."""
    path, stamp = results_path(bench), fingerprint()
    _merge(path, ({"bench": bench, **row, **stamp} for row in rows))
    return path


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A rich table; tab-separated text where rich is absent. Floats have four significant digits, None is a dash."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return (
            f"{value:.4g}"
            if isinstance(value, float) and abs(value) < 1000
            else f"{value:.0f}"
            if isinstance(value, float)
            else str(value)
        )

    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, "\t".join(columns), *("\t".join(map(cell, row)) for row in rows), sep="\n", flush=True)
        return
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(cell, row))
    # Off a terminal (a log, a pipe) rich assumes 80 columns and would cut the numbers.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, help="result files to merge, each in a folder of its device's name"
    )
    for given in parser.parse_args().files:
        if not given.is_file():
            parser.error(f"no such file: {given}")
        target = ROOT / "bench" / "results" / given.resolve().parent.name / given.name
        _merge(target, read_rows(given))
        print(f"{given} -> {target.relative_to(ROOT)}")
