"""Weights from memory into a running engine: adapters in place, routers checked, KV of old weights never reused."""

import asyncio
import logging
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from beam_moe.weight_sync import check_routers, checksum, declare_routers, rounded_to_bf16

LIMIT = 2e-3
CONFIG = {"r": 4, "lora_alpha": 8}


def call(worker, method, args, kwargs):
    """As vLLM's workers take a call: a method's name, or a function of a worker."""
    return (method if callable(method) else getattr(type(worker), method))(worker, *args, **(kwargs or {}))


class Engine:
    """`LLM` and `AsyncLLM` as far as a trainer uses them: calls every worker, resets the prefix cache."""

    def __init__(self, *workers):
        self.workers, self.resets, self.resettable = workers, 0, True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [call(w, method, args, kwargs) for w in self.workers]

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        assert reset_running_requests and reset_connector, "KV of the old weights"
        self.resets += 1
        return self.resettable


class QueuedEngine(Engine):
    """As vLLM's executor of several processes: it reads no further than the first error, and what the workers behind
    it answered is what they are taken to answer to the next call."""

    def __init__(self, *workers):
        super().__init__(*workers)
        self.queues = [[] for _ in workers]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        args = pickle.loads(pickle.dumps(args))
        for queue, worker in zip(self.queues, self.workers):
            try:
                queue.append((True, call(worker, method, args, kwargs)))
            except Exception as error:
                queue.append((False, error))
        answers = []
        for queue in self.queues:
            fine, answer = queue.pop(0)
            if not fine:
                raise RuntimeError(f"Worker failed with error '{answer}'")
            answers.append(answer)
        return answers


class AsyncEngine(Engine):
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return super().collective_rpc(method, timeout, args, kwargs)

    async def reset_prefix_cache(self, **options):
        return super().reset_prefix_cache(**options)


@pytest.fixture
def engine(harness, tmp_path):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from beam_moe.integrations.vllm.weight_sync import WeightSync

    config = harness.engine_config(harness.write_config(tmp_path / "m"))
    with harness.built(config) as (model, manager):

        class Worker(WeightSync):
            """The runner's part of `reload_weights`, on vLLM's real in-place reload."""

            model_runner = SimpleNamespace(
                lora_manager=manager, get_model=lambda: model, execute_model=lambda scheduled: "ran",
                _ensure_lora_enabled=lambda: None,
            )  # fmt: skip

            def reload_weights(self, weights_iterator):
                with set_current_vllm_config(config):
                    reload_weights(config, model, weights_iterator, None, True)
                manager.remove_all_adapters()

        yield SimpleNamespace(llm=Engine(Worker()), asynchronous=AsyncEngine(Worker()), model=model, manager=manager)


def difference(harness, engine, seed, shared=False):
    slot = engine.manager._adapter_manager.lora_index_to_id.index(1)
    want = harness.expected_stacks(2, 1, 0, shared, seed=seed)
    return harness.largest_difference(harness.experts_stacks(engine.model, 2, slot), want)


def test_adapter_from_memory_in_place(harness, engine):
    """Three versions, two layouts; buffers keep their storage, the caller's tensors their bits."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    with pytest.raises(ValueError, match="has not been sent"):
        _ = sync.request
    storage = {k: v.data_ptr() for k, v in harness.experts_stacks(engine.model, 2, 0).items()}
    paths = set()
    for seed, layout in ((0, "per_expert"), (5, "flat"), (9, "per_expert")):
        tensors = harness.adapter_tensors(layout, seed=seed)
        before = {k: v.clone() for k, v in tensors.items()}
        request = sync.update(engine.llm, tensors, CONFIG)
        assert all(torch.equal(before[k], v) for k, v in tensors.items()), "alpha / r was folded into live tensors"
        paths.add(request.lora_path)
        assert engine.manager.add_adapter(request), "a request must find the adapter, not look for a file"
        assert difference(harness, engine, seed) < LIMIT
    assert len(paths) == 3, "vLLM's block hashes know a version by its path alone"
    assert storage == {k: v.data_ptr() for k, v in harness.experts_stacks(engine.model, 2, 0).items()}


def test_async_engine(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    request = asyncio.run(sync.update_async(engine.asynchronous, harness.adapter_tensors("shared", seed=3), CONFIG))
    assert request.lora_path.endswith("/policy/1") and difference(harness, engine, 3, shared=True) < LIMIT


def test_block_hashes_tell_versions_apart(harness, engine):
    """vLLM's own hash of a request: equal within a version, other after an update."""
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync, keys = AdapterSync("policy", 1), []
    for seed in (0, 1):
        sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=seed), CONFIG)
        keys += [_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=sync.request)) for _ in range(2)]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize(
    "broken, message", [("router", "is a router"), ("unknown", "no layer takes"), ("rank", "max_lora_rank")]
)
def test_a_bad_adapter_leaves_the_loaded_one(harness, engine, broken, message):
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    tensors = harness.adapter_tensors("per_expert", seed=1, router=broken == "router")
    if broken == "unknown":
        tensors["base_model.model.model.layers.0.mlp.other_proj.lora_A.weight"] = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=message):
        sync.update(engine.llm, tensors, {"r": 64, "lora_alpha": 64} if broken == "rank" else CONFIG)
    assert difference(harness, engine, 0) < LIMIT and sync.generation == 1


def put(tensors, name, a, b):
    """``tensors`` with a module's factors of these shapes, None for an absent one."""
    for factor, shape in (("A", a), ("B", b)):
        tensors.pop(f"{name}.lora_{factor}.weight", None)
        if shape is not None:
            tensors[f"{name}.lora_{factor}.weight"] = torch.ones(shape)


EXPERTS = "model.layers.2.mlp.experts"
Q, O = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    "module, a, b, message",
    [
        (f"{EXPERTS}.9.gate_proj", (4, 64), (32, 4), "no layer takes"),
        (f"{EXPERTS}.0.gate_up_proj", (4, 64), (64, 4), "no layer takes"),
        (f"{EXPERTS}.w4", (8, 4, 64), (8, 32, 4), "no layer takes"),
        (f"{EXPERTS}.0.gate_proj", (4, 64), (32, 2), "lora_A has rank 4, lora_B 2"),
        (f"{EXPERTS}.0.gate_proj", (4, 64), None, "only one of"),
        (f"{EXPERTS}.0.down_proj", (2, 32), (64, 2), "different ranks"),
        (f"{EXPERTS}.0.down_proj", (4, 16), (64, 4), "different widths"),
        (Q, (16, 64), (64, 16), "rank 16, more than max_lora_rank=8"),
        (Q, (4, 64), (64, 2), r"\(r, 64\) and \(64, r\), got \(4, 64\) and \(64, 2\)"),
        (Q, (4, 32), (64, 4), r"\(r, 64\) and \(64, r\)"),
        (Q, (4, 64), (32, 4), r"\(r, 64\) and \(64, r\)"),
        (O, (4, 32), (64, 4), r"\(r, 64\) and \(64, r\)"),
        (Q, None, (64, 4), "only one of"),
        (Q, (4, 64), None, "only one of"),
    ],
)
def test_what_would_not_be_applied_whole_is_refused_by_name(harness, engine, tmp_path, module, a, b, message):
    """From memory and from a folder, before the loaded one goes: vLLM drops it, cuts it down or fails half-way."""
    from safetensors.torch import save_file

    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    tensors = harness.adapter_tensors("per_expert", seed=1)
    put(tensors, f"base_model.model.{module}", a, b)
    with pytest.raises(ValueError, match=message) as refused:
        sync.update(engine.llm, tensors, CONFIG)
    assert module.rsplit(".", 2)[0] in str(refused.value)
    path = harness.write_adapter(tmp_path / "a", "none")
    save_file({k: v.contiguous() for k, v in tensors.items()}, f"{path}/adapter_model.safetensors")
    with pytest.raises(ValueError, match=message if "no layer" not in message else "expected target modules"):
        engine.manager.add_adapter(harness.request(path, 1, load_inplace=True))
    assert difference(harness, engine, 0) < LIMIT and sync.generation == 1


def test_experts_rank_above_the_engines(harness, engine):
    """Its configuration may understate it."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    for layout in ("per_expert", "flat", "shared", "packed"):
        with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.w\d has rank 16, more than max_lora_rank=8"):
            sync.update(engine.llm, harness.adapter_tensors(layout, rank=16, attention=False, dense=False), CONFIG)
    assert difference(harness, engine, 0) < LIMIT


def test_ranks_that_differ_between_modules(harness, engine):
    """rank_pattern: each module its own rank and scaling, the bank the largest of its experts'."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    tensors = harness.adapter_tensors("per_expert", seed=0)
    for e in range(harness.E):
        put(tensors, f"base_model.model.{EXPERTS}.{e}.down_proj", (8, harness.I), (harness.H, 8))
    config = {**CONFIG, "rank_pattern": {r"layers\.2\.mlp\.experts\.\d+\.down_proj": 8}}
    AdapterSync("policy", 1).update(engine.llm, tensors, config)
    stacks, want = harness.experts_stacks(engine.model, 2, 0), harness.expected_stacks(2, 1, 0, False)
    gate = {k: want[k] for k in ("w1.a", "w1.b", "w3.a", "w3.b")}
    assert harness.largest_difference({k: stacks[k] for k in gate}, gate) < LIMIT
    assert bool((stacks["w2.a"] == 1).all()) and bool((stacks["w2.b"] == 1).all()), "alpha / 8 is 1"
    experts = engine.model.moe_layers[0].routed_experts.quant_method.moe_kernel.impl.fused_experts
    assert experts.ranks[0] == 8


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("refused", ["stage", "prepare_adapter", "load_adapter"])
def test_an_adapter_that_one_rank_refuses_reaches_none(harness, engine, refused, first):
    """Otherwise some ranks would serve the new version under the name of the old one. Whenever it is refused, and in a
    way that leaves vLLM's executor in step with its workers."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync, WeightSync

    class Refusing(WeightSync):
        refuses = False

        def answer(self, method):
            if self.refuses and method == refused:
                raise ValueError("this rank refuses")
            return []

    for method in ("stage", "prepare_adapter", "load_adapter"):
        setattr(Refusing, f"beam_moe_{method}", lambda self, *args, method=method: self.answer(method))
    refusing = Refusing()
    llm = QueuedEngine(*((refusing, *engine.llm.workers) if first else (*engine.llm.workers, refusing)))
    sync, other = AdapterSync("policy", 1), AdapterSync("other", 2)
    other.update(llm, harness.adapter_tensors("per_expert", seed=7), CONFIG)
    sync.update(llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    refusing.refuses = True
    for update in (sync.update, as_blocking(sync.update_async)):
        with pytest.raises(ValueError, match="^this rank refuses$"):
            update(llm, harness.adapter_tensors("per_expert", seed=1, rank=2), {**CONFIG, "r": 2})
        assert difference(harness, engine, 0) < LIMIT and sync.generation == 1
        experts = engine.model.moe_layers[0].routed_experts.quant_method.moe_kernel.impl.fused_experts
        assert sorted(engine.manager._adapter_manager.lora_index_to_id) == [1, 2] and experts.ranks.tolist() == [4, 4]
        assert not held(engine.llm.workers[0]), "memory of a version that was refused"
    refusing.refuses = False
    sync.update(llm, harness.adapter_tensors("per_expert", seed=2), CONFIG)
    assert difference(harness, engine, 2) < LIMIT, "what was prepared before must be gone"
    assert llm.collective_rpc("beam_moe_discard", args=("adapter/1",)) == [None, None]
    assert not held(engine.llm.workers[0]), "memory of a version"


def held(worker):
    """What a worker keeps of a sync that is over."""
    return [name for name in ("staged", "prepared", "before") if vars(worker).get(f"_beam_moe_{name}")]


def test_a_sync_that_fails_at_the_caller_leaves_no_memory(harness, engine):
    """A checkpoint is most of a worker's memory, and whoever sends it may never come back."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync, sync_weights

    def tensors():
        yield "model.norm.weight", torch.zeros(4)
        raise KeyError("the trainer's")

    for sync in (
        lambda: sync_weights(engine.llm, tensors(), {}),
        lambda: sync_weights(engine.llm, {"model.norm.weight": torch.zeros(4)}),
        lambda: AdapterSync("policy", 1).update(engine.llm, {}, CONFIG),
    ):
        with pytest.raises((KeyError, ValueError), match="the trainer's|did not come|nothing was staged"):
            sync()
        assert not held(engine.llm.workers[0])


def test_updates_that_overlap_are_not_mixed(harness, engine, monkeypatch):
    """Each of several pieces: the engine answers one's calls between the other's."""
    from beam_moe.integrations.vllm import weight_sync

    async def rpc(*args, **options):
        await asyncio.sleep(0)
        return engine.llm.collective_rpc(*args, **options)

    async def both():
        await asyncio.gather(*(sync.update_async(SimpleNamespace(collective_rpc=rpc), v, CONFIG) for v in versions))

    monkeypatch.setattr(weight_sync.pieces, "__defaults__", (2000,))
    versions = [harness.adapter_tensors("per_expert", seed=seed) for seed in (0, 1)]
    sync = weight_sync.AdapterSync("policy", 1)
    asyncio.run(both())
    assert difference(harness, engine, 1) < LIMIT and sync.generation == 2


class SlowEngine(AsyncEngine):
    """Answers between the calls of others; its caller is cancelled while it is at ``stops``, which it still does."""

    stops = None

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        answer = await super().collective_rpc(method, timeout, args, kwargs)
        if self.stops in (method, *args[:1]):
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        return answer


@pytest.mark.parametrize("stops", ["beam_moe_stage", "beam_moe_prepare_adapter", "beam_moe_load_adapter"])
def test_an_update_that_is_cancelled_leaves_the_version_before(harness, engine, stops):
    """As by ``asyncio.wait_for``: the trainer goes on with the request it has."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    slow, sync = SlowEngine(*engine.llm.workers), AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    slow.stops = stops
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sync.update_async(slow, harness.adapter_tensors("per_expert", seed=1), CONFIG))
    assert difference(harness, engine, 0) < LIMIT and sync.generation == 1
    assert not held(engine.llm.workers[0])


def test_an_update_that_is_cancelled_once_it_has_landed_counts(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    class Landed(SlowEngine):
        """Is cancelled in the last call."""

        async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            if args[0] == "beam_moe_load_adapter":
                self.stops = "beam_moe_discard"
                return await AsyncEngine.collective_rpc(self, method, timeout, args, kwargs)
            return await super().collective_rpc(method, timeout, args, kwargs)

    sync = AdapterSync("policy", 1)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sync.update_async(Landed(*engine.llm.workers), harness.adapter_tensors("shared"), CONFIG))
    assert difference(harness, engine, 0, shared=True) < LIMIT
    assert sync.request.lora_path.endswith("/policy/1")


def test_a_weight_sync_that_is_cancelled_leaves_no_memory(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import sync_weights_async

    slow = SlowEngine(*engine.llm.workers)
    slow.stops = "beam_moe_stage"
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sync_weights_async(slow, checkpoint(harness)))
    assert not held(engine.llm.workers[0])


def test_weight_syncs_that_overlap_are_not_mixed(harness, engine, monkeypatch):
    """Routers may be frozen: their bits do not tell the pieces of one checkpoint from those of another."""
    from beam_moe.integrations.vllm import weight_sync

    monkeypatch.setattr(weight_sync.pieces, "__defaults__", (20000,))
    first, second = checkpoint(harness, 0), checkpoint(harness, 1)
    second |= routers(first)
    slow = SlowEngine(*engine.llm.workers)

    async def both():
        await asyncio.gather(*(weight_sync.sync_weights_async(slow, state) for state in (first, second)))

    asyncio.run(both())
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(dict(engine.model.named_parameters())[name], second[name])


def test_what_an_engine_in_another_process_refuses_is_a_value_error(engine):
    """vLLM's client raises a bare `Exception` for it; what is wrong with the engine itself keeps its type."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    for error, kind in ((Exception("Call to collective_rpc method failed: is a router"), ValueError),
                        (RuntimeError("is a router"), RuntimeError)):  # fmt: skip

        def rpc(method, args, error=error):
            if args[0] == "beam_moe_stage":
                raise error
            return [None]

        for update in (AdapterSync("policy", 1).update, as_blocking(AdapterSync("policy", 1).update_async)):
            with pytest.raises(kind, match="^is a router$"):
                update(SimpleNamespace(collective_rpc=rpc), {"a": torch.zeros(1)}, CONFIG)


def as_blocking(update):
    """`AdapterSync.update_async` for an engine whose calls block."""

    def call(llm, *args):
        async def rpc(*a, **k):
            return llm.collective_rpc(*a, **k)

        return asyncio.run(update(SimpleNamespace(collective_rpc=rpc), *args))

    return call


def test_a_first_adapter_that_one_rank_fails_to_load_is_on_none(harness, engine, monkeypatch):
    """Half loaded on the rank that fails, whole on the other."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync

    inner = engine.manager._adapter_manager
    monkeypatch.setattr(inner, "activate_adapter", lambda number: 1 / 0)
    with pytest.raises(ValueError, match="division by zero"):
        AdapterSync("policy", 1).update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    assert not engine.manager.list_adapters() and set(inner.lora_index_to_id) == {None}


def test_an_adapter_from_memory_is_found_again(harness, tmp_path):
    """vLLM drops one for another and at its own reload; a request for it has no folder to read it from."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync, WeightSync

    config = harness.engine_config(harness.write_config(tmp_path / "m"))
    config.lora_config.max_loras = config.lora_config.max_cpu_loras = 1
    with harness.built(config) as (model, manager):
        worker = WeightSync()
        worker.model_runner = SimpleNamespace(lora_manager=manager)
        llm, here = Engine(worker), SimpleNamespace(model=model, manager=manager)
        first, second = AdapterSync("first", 1), AdapterSync("second", 2)
        first.update(llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
        second.update(llm, harness.adapter_tensors("per_expert", seed=1), CONFIG)
        assert manager.list_adapters() == {2}
        manager.add_adapter(first.request)  # as a step does with the requests of its batch
        assert manager.list_adapters() == {1} and difference(harness, here, 0) < LIMIT
        first.update(llm, harness.adapter_tensors("per_expert", seed=2), CONFIG)
        manager.remove_all_adapters()  # as vLLM's `reload_weights` and `finish_weight_update` do
        manager.add_adapter(first.request)
        assert difference(harness, here, 2) < LIMIT, "the last version"
        folder = harness.request(harness.write_adapter(tmp_path / "a", "per_expert", seed=3), 1, load_inplace=True)
        manager.add_adapter(folder)
        assert difference(harness, here, 3) < LIMIT, "a folder under the same number is read"
        manager.remove_adapter(1)
        with pytest.raises(Exception, match="No adapter found for /beam-moe/in-memory/first/2"):
            manager.add_adapter(first.request)


@pytest.mark.parametrize("fits_back", [True, False])
def test_a_version_taken_back_is_not_found_again(harness, engine, monkeypatch, fits_back):
    """Nor where the version before cannot be put back at once, for want of memory."""
    from beam_moe.integrations.vllm import weight_sync

    sync = weight_sync.AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    worker = type(engine.llm.workers[0])
    load = worker.beam_moe_load_adapter

    def load_and_fail(self, *args):
        load(self, *args)
        raise RuntimeError("no memory")

    monkeypatch.setattr(worker, "beam_moe_load_adapter", load_and_fail)
    if not fits_back:
        monkeypatch.setattr(weight_sync, "put_back", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="no memory" if fits_back else "division by zero"):
        sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=1), CONFIG)
    assert not held(engine.llm.workers[0])
    engine.manager.remove_all_adapters()
    engine.manager.add_adapter(sync.request)
    assert difference(harness, engine, 0) < LIMIT


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("fails", ["_load_adapter", "activate_adapter"])
def test_a_folder_that_one_rank_refuses_reaches_none(harness, engine, core, tmp_path, fails, first):
    """`load_lora_adapter` with several ranks: the version before stays on all of them, the executor in step."""
    from beam_moe.integrations.vllm.weight_sync import load_on_every_rank_or_none

    class Rank:
        """A rank that may refuse an adapter as it reads it, or fail once it has begun to load it."""

        failing = None

        def __init__(self):
            self.model_runner = SimpleNamespace(lora_manager=self, _ensure_lora_enabled=lambda: None)
            self._adapter_manager, self.capacity, self.lora_index_to_id = self, 2, []
            self.held, self._registered_adapters = {}, SimpleNamespace(cache={})

        def _load_adapter(self, request):
            self.fail("_load_adapter")
            return SimpleNamespace(id=request.lora_int_id)

        def activate_adapter(self, number):
            self.fail("activate_adapter")

        def fail(self, name):
            if self.failing == name:
                raise ValueError("this rank refuses")

        def list_adapters(self):
            return set(self.held)

        def add_adapter(self, lora):
            self.held[lora.id] = lora

        def remove_adapter(self, number):
            self.held.pop(number, None)

        def __len__(self):
            return len(self.held)

    load_on_every_rank_or_none()
    rank, worker = Rank(), engine.llm.workers[0]
    queued = QueuedEngine(*((rank, worker) if first else (worker, rank)))
    core.model_executor = queued

    def load(seed, **options):
        path = harness.write_adapter(tmp_path / f"{seed}", "per_expert", seed=seed)
        return core.add_lora(harness.request(path, 1, load_inplace=True, **options))

    assert load(0)
    rank.failing = fails
    with pytest.raises(ValueError, match="^this rank refuses$"):
        load(1)
    assert difference(harness, engine, 0) < LIMIT
    rank.failing = None
    assert queued.collective_rpc(lambda worker: "rank") == ["rank", "rank"], "an answer left over"
    assert load(2) and difference(harness, engine, 2) < LIMIT
    assert not any(name.startswith("_beam_moe_re") for name in vars(engine.manager)), "memory of a version"


# --- KV of old weights


@pytest.fixture
def core(fake_hopper, monkeypatch):
    """vLLM's engine core as far as adapters and requests are concerned, under our wraps; ``core.request(id, lora)``."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from beam_moe.integrations.vllm import kv_reuse

    kv_reuse.tell_generations_apart()
    kv_cache_utils.init_none_hash(sha256)
    monkeypatch.setattr(kv_reuse, "generations", type(kv_reuse.generations)())
    core = object.__new__(EngineCore)

    def rpc(method, *args, **kwargs):
        return [([], None) if callable(method) or method == "beam_moe_attempt" else []]

    executor = {"add_lora": lambda r: True, "remove_lora": lambda i: True, "collective_rpc": rpc}
    core.model_executor = SimpleNamespace(**executor, supported_tasks=("generate",))
    requests = {}
    core.resets, core.resettable = [], True

    def reset(*given):
        core.resets.append(given)
        return core.resettable

    core.scheduler = SimpleNamespace(
        requests=requests, add_request=lambda r: requests.setdefault(r.request_id, r), reset_prefix_cache=reset
    )
    hasher = kv_cache_utils.get_request_block_hasher(4, sha256)

    def request(name, lora):
        params = SamplingParams(max_tokens=4)
        return Request(name, list(range(12)), params, None, lora_request=lora, block_hasher=hasher)

    core.request = request
    return core


def lora_request(path="/a", number=1, **options):
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", number, path, **options)


def fails_as_a_folder(core):
    def add_lora(request):
        raise RuntimeError("no memory")

    core.model_executor.add_lora = add_lora
    core.model_executor.collective_rpc = lambda *_, **__: [(None, "no memory")]
    with pytest.raises((ValueError, RuntimeError), match="no memory"):
        core.add_lora(lora_request(load_inplace=True))


def fails_as_it_is_removed(core):
    core.model_executor.remove_lora = lambda number: 1 / 0
    with pytest.raises(ZeroDivisionError):
        core.remove_lora(1)


def fails_on_one_rank(core, method, args):
    from beam_moe.integrations.vllm.weight_sync import refuse_requests_between_versions

    def answer(*_):
        if method != "beam_moe_attempt":
            raise RuntimeError("Worker failed with error 'no memory'")
        return [([], None), (None, "no memory")]

    refuse_requests_between_versions()  # which turns a worker's error into one of the engine
    core.model_executor.collective_rpc = answer
    with pytest.raises((ValueError, RuntimeError), match="no memory"):
        core.collective_rpc(method, args=args)


@pytest.mark.parametrize(
    "replace",
    [
        lambda core: core.add_lora(lora_request(load_inplace=True)),
        lambda core: core.add_lora(lora_request("/b", load_inplace=True)),
        lambda core: core.remove_lora(1),
        lambda core: core.collective_rpc("beam_moe_load_adapter", args=("adapter/1", 1, {})),
        lambda core: core.collective_rpc("beam_moe_load_adapter", kwargs={"key": "k", "number": 1, "config": {}}),
        lambda core: core.collective_rpc("beam_moe_attempt", args=("beam_moe_load_adapter", "adapter/1", 1, {})),
        lambda core: core.collective_rpc("beam_moe_attempt", args=["beam_moe_restore_adapter", "adapter/1", 1]),
        lambda core: fails_on_one_rank(core, "beam_moe_attempt", ("beam_moe_load_adapter", "adapter/1", 1, {})),
        lambda core: fails_on_one_rank(core, "beam_moe_load_adapter", ("adapter/1", 1, {})),
        fails_as_a_folder,
        fails_as_it_is_removed,
    ],
    ids=["in place", "in place, another path", "removed", "from memory", "from memory, by name", "an attempt",
         "taken back", "an attempt that fails on one rank", "failed on one rank", "a folder, on one rank",
         "a removal, on one rank"],
)  # fmt: skip
def test_a_replaced_adapter_shares_no_block_with_the_one_before(core, replace):
    """Requests before and after, one that waits meanwhile, one on its way into the engine, and one that runs."""
    before, again = core.request("a", lora_request()), core.request("b", lora_request())
    assert before.block_hashes == again.block_hashes and len(before.block_hashes) == 3
    other, bare = core.request("o", lora_request(number=2, path="/other")), core.request("n", None)
    waiting, running, coming = (core.request(name, lora_request()) for name in "wrc")
    running.num_computed_tokens = 4
    core.add_request(waiting)
    core.add_request(running)
    replace(core)
    core.add_request(coming)
    after = core.request("d", lora_request())
    assert not set(after.block_hashes) & set(before.block_hashes)
    assert after.block_hashes == waiting.block_hashes == coming.block_hashes
    assert running.block_hashes == before.block_hashes
    assert core.request("p", lora_request(number=2, path="/other")).block_hashes == other.block_hashes
    assert core.request("m", None).block_hashes == bare.block_hashes
    # vLLM's server gives an adapter that is loaded again another number
    assert not set(core.request("e", lora_request(number=7)).block_hashes) & set(before.block_hashes)


def test_an_adapter_replaced_while_a_request_is_hashed(core, monkeypatch):
    """In the thread that takes requests: the first blocks would be found in the KV of the version before."""
    from beam_moe.integrations.vllm import kv_reuse

    class ReplacedMeanwhile(type(kv_reuse.generations)):
        reads = 0

        def __getitem__(self, number):
            self.reads += 1
            return super().__getitem__(number) + (self.reads > 2)

    before = core.request("a", lora_request())
    monkeypatch.setattr(kv_reuse, "generations", ReplacedMeanwhile())
    coming = core.request("c", lora_request())
    assert coming.block_hashes[0] == before.block_hashes[0] and coming.block_hashes[2] != before.block_hashes[2]
    core.add_request(coming)
    assert not set(coming.block_hashes) & set(before.block_hashes)
    assert coming.block_hashes == core.request("d", lora_request()).block_hashes


def test_requests_that_load_in_place_share_no_block(core):
    first, second = (core.request(name, lora_request(load_inplace=True)) for name in "ab")
    assert not set(first.block_hashes) & set(second.block_hashes)


def test_another_number_shares_no_block(core):
    """vLLM's server forgets an adapter that is unloaded without telling the engine; the next has a new number."""
    before = core.request("a", lora_request())
    core.add_lora(lora_request(number=2))
    assert not set(core.request("b", lora_request(number=2)).block_hashes) & set(before.block_hashes)


def test_other_calls_keep_blocks(core):
    before = core.request("a", lora_request())
    core.add_lora(lora_request())
    core.collective_rpc("beam_moe_report")
    core.collective_rpc("beam_moe_attempt", args=("beam_moe_prepare_adapter", "adapter/1", 1, {}))
    core.add_lora(lora_request(number=2, load_inplace=True))
    assert core.request("b", lora_request()).block_hashes == before.block_hashes


def test_large_adapters_come_in_pieces(harness):
    from safetensors.torch import load

    from beam_moe.integrations.vllm.weight_sync import pieces

    tensors = {f"t{i}": torch.full((8, 8), float(i)) for i in range(5)}
    parts = [load(p) for p in pieces(tensors, limit=600)]
    assert [sorted(p) for p in parts] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    shared = torch.arange(8.0)
    both = load(next(pieces({"a": shared, "b": shared[4:]})))
    assert torch.equal(both["b"], shared[4:])


# --- base weights


def checkpoint(harness, seed=0) -> dict[str, torch.Tensor]:
    return harness.checkpoint(seed)


def test_full_reload_keeps_fp32_routers_and_adapters(harness, engine):
    """Real in-place reload under LoRA: router bits arrive, experts are the new ones, the adapter is still there."""
    from beam_moe.integrations.vllm.weight_sync import AdapterSync, sync_weights

    sync = AdapterSync("policy", 1)
    sync.update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    state = checkpoint(harness)
    w13 = engine.model.moe_layers[0].routed_experts.w13_weight
    address = w13.data_ptr()
    sync_weights(engine.llm, state, declare_routers(state))
    assert engine.llm.resets == 1
    block = engine.model.model.layers[2].mlp
    assert torch.equal(block.gate.base_layer.weight, state["model.layers.2.mlp.gate.weight"])
    bias = block.gate.base_layer.e_score_correction_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, state["model.layers.2.mlp.gate.e_score_correction_bias"])
    layer = engine.model.moe_layers[0].routed_experts
    assert layer.w13_weight.data_ptr() == address, "a captured graph reads the old address"
    assert torch.equal(layer.w13_weight[3, : harness.I], state["model.layers.2.mlp.experts.3.gate_proj.weight"])
    assert torch.equal(layer.w13_weight[3, harness.I :], state["model.layers.2.mlp.experts.3.up_proj.weight"])
    assert difference(harness, engine, 0) < LIMIT
    experts = layer.quant_method.moe_kernel.impl.fused_experts
    slot = engine.manager._adapter_manager.lora_index_to_id.index(1)
    assert experts.ranks[slot] == 4 and experts.bank.enabled[slot] == 1


def test_weights_that_do_not_arrive_are_an_error(harness, engine):
    """vLLM only warns; an expert under a name its loader does not know would leave the engine on old weights."""
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    lost = {k: v for k, v in state.items() if "layers.2.mlp.experts" not in k}
    with pytest.raises(ValueError, match=r"kept old weights.*layers\.2\.mlp\.experts"):
        sync_weights(engine.llm, lost, declare_routers(lost))
    peft = {k.replace("_proj.weight", "_proj.base_layer.weight"): v for k, v in state.items()}
    sync_weights(
        engine.llm, {f"base_model.model.{k}": v for k, v in peft.items() if "mlp.gate." not in k} | routers(state)
    )
    layer = engine.model.moe_layers[0].routed_experts
    assert torch.equal(layer.w2_weight[5], state["model.layers.2.mlp.experts.5.down_proj.weight"])


def test_weights_that_do_not_arrive_are_an_error_in_a_quiet_log(harness, engine):
    """What tells is a warning of vLLM's, which VLLM_LOGGING_LEVEL=ERROR keeps from being logged."""
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    logger, name = logging.getLogger("vllm"), "model.layers.0.self_attn.gate_bias"
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with pytest.raises(ValueError, match=rf"^weight sync: the engine kept old weights: .*'{name}'"):
            sync_weights(engine.llm, {k: v for k, v in checkpoint(harness).items() if k != name})
        reload = logging.getLogger("vllm.model_executor.model_loader.reload.inplace")
        assert reload.getEffectiveLevel() == logging.ERROR and not reload.handlers
    finally:
        logger.setLevel(level)


def routers(state):
    return {k: v for k, v in state.items() if "mlp.gate." in k}


def test_rounded_routers_are_refused_by_name(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    declared = declare_routers(state)
    assert len(declared) == 4
    before = engine.model.model.layers[2].mlp.gate.base_layer.weight.clone()
    name = "model.layers.2.mlp.gate.weight"
    with pytest.raises(ValueError, match=rf"{name} arrived is torch.bfloat16"):
        sync_weights(engine.llm, {**state, name: state[name].bfloat16()}, declared)
    with pytest.raises(ValueError, match=rf"{name} arrived has checksum"):
        sync_weights(engine.llm, {**state, name: state[name].bfloat16().float()}, declared)
    with pytest.raises(ValueError, match=rf"{name} was declared bfloat16"):
        sync_weights(engine.llm, state, declare_routers({**state, name: state[name].bfloat16()}))
    with pytest.raises(ValueError, match=rf"{name} came without a declaration"):
        sync_weights(engine.llm, state, {k: v for k, v in declared.items() if k != name})
    assert torch.equal(before, engine.model.model.layers[2].mlp.gate.base_layer.weight), (
        "refused before anything is loaded"
    )
    engine.llm.resettable = False
    with pytest.raises(ValueError, match="prefix cache"):
        sync_weights(engine.llm, state, declared)


@pytest.mark.parametrize(
    "lost",
    [
        "model.layers.2.mlp.experts.3.gate_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.o_proj",
        "model.norm",
        "lm_head",
    ],
)
def test_a_part_of_a_weight_that_did_not_come_is_named(harness, engine, lost):
    """vLLM counts joined projections and experts as loaded with the first of them; the rest would be junk."""
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    with pytest.raises(ValueError, match=rf"kept old weights: {lost} did not come"):
        sync_weights(engine.llm, {k: v for k, v in state.items() if not k.startswith(f"{lost}.")})
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters()), "nothing may be loaded"


@pytest.mark.parametrize(
    "name, cut, want, got",
    [
        ("model.layers.2.mlp.experts.3.gate_proj", lambda t: t[:16], (32, 64), (16, 64)),
        ("model.layers.2.mlp.experts.0.up_proj", lambda t: t[:, :1], (32, 64), (32, 1)),
        ("model.layers.3.mlp.experts.7.down_proj", lambda t: t[:, :31], (64, 32), (64, 31)),
        ("model.layers.3.mlp.experts.7.down_proj", lambda t: t.T, (64, 32), (32, 64)),
        ("model.layers.3.mlp.experts.7.down_proj", lambda t: t[None], (64, 32), (1, 64, 32)),
        ("model.layers.2.mlp.gate", lambda t: t[:7], (8, 64), (7, 64)),
        ("model.layers.0.self_attn.k_proj", lambda t: torch.cat([t, t]), (32, 64), (64, 64)),
        ("model.layers.0.self_attn.gate_proj", lambda t: t[:32], (64, 64), (32, 64)),
        ("model.layers.1.self_attn.o_proj", lambda t: torch.cat([t, t], 1), (64, 64), (64, 128)),
        ("model.layers.1.mlp.up_proj", lambda t: t[:1], (96, 64), (1, 64)),
        ("model.layers.1.mlp.down_proj", lambda t: t.T, (64, 96), (96, 64)),
        ("model.embed_tokens", lambda t: t[:, :1], (256, 64), (256, 1)),
        ("lm_head", lambda t: t[:255], (256, 64), (255, 64)),
        ("model.norm", lambda t: t[:1], (64,), (1,)),
        ("model.layers.0.self_attn.q_norm", lambda t: t[None], (16,), (1, 16)),
        ("model.layers.0.self_attn.gate_bias", lambda t: torch.cat([t, t]), (4,), (8,)),
    ],
)
def test_a_weight_of_another_shape_is_named(harness, engine, name, cut, want, got):
    """vLLM fills a corner of an expert, repeats a single row, drops what is too much, or fails once it has begun."""
    from beam_moe.integrations.vllm.weight_sync import PARTLY, sync_weights

    state = checkpoint(harness)
    name = name if name in state else f"{name}.weight"
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    message = rf"weight sync: {re.escape(f'{name} must have shape {want}, got {got}')}$"
    with pytest.raises(ValueError, match=message) as refused:
        sync_weights(engine.llm, {**state, name: cut(state[name]).contiguous()})
    assert PARTLY not in str(refused.value)
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters()), "nothing may be loaded"


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.9.mlp.gate_proj.weight",
        f"{EXPERTS}.99.gate_proj.weight",
        "scale",
    ],
)
def test_a_tensor_that_no_layer_takes_is_named(harness, engine, name):
    """vLLM's loader fails at it once it has begun, or passes over it."""
    from beam_moe.integrations.vllm.weight_sync import PARTLY, sync_weights

    plain = name.removeprefix("base_model.model.")
    with pytest.raises(ValueError, match=rf"^weight sync: no layer takes {re.escape(plain)}$") as refused:
        sync_weights(engine.llm, {**checkpoint(harness), name: torch.zeros(4)})
    assert PARTLY not in str(refused.value)
    sync_weights(engine.llm, {**checkpoint(harness), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})


def test_shapes_of_a_checkpoint_on_every_rank(harness, tp2, pp2):
    """A whole one fits; of a rank's share each rank refuses every weight that it has."""
    for rank, task in ((tp2, 10), (tp2, 11), (pp2, 7)):
        refused = set()
        for result in (r[task] for r in rank):
            assert result["whole"] == []
            numbers = {re.search(r"layers\.(\d+)|$", n)[1] for n in result["half"]} - {None}
            assert numbers == {str(n) for n in result["layers"]}
            refused.update(result["half"])
        assert refused == set(checkpoint(harness))


def qwen3(state):
    """The tiny Beam's `checkpoint` as one of Qwen3-MoE's single layer."""
    layer = {n.replace("layers.2.", "layers.0."): t for n, t in state.items() if "layers.2." in n}
    layer = {n: t for n, t in layer.items() if not re.search(r"self_attn\.gate|feedforward|e_score", n)}
    return layer | {n: t for n, t in state.items() if "layers." not in n}


@pytest.mark.parametrize("base, options", [("BEAM", {"quantization": "mxfp8"}), ("QWEN", {})], ids=["MXFP8", "Qwen3"])
def test_shapes_of_a_checkpoint_in_other_engines(harness, tmp_path, monkeypatch, base, options):
    """What the engine quantises as it loads has the checkpoint's size; Qwen3 joins heads in another layer."""
    from beam_moe.integrations.vllm.weight_sync import foreign, misshapen

    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "HummingMxfp8LinearKernel,MarlinMxfp8LinearKernel,TorchMxFp8LinearKernel"
    )
    state = checkpoint(harness) if base == "BEAM" else qwen3(checkpoint(harness))
    config = harness.engine_config(harness.write_config(tmp_path / "m", getattr(harness, base)), **options)
    with harness.built(config) as (model, _):
        assert misshapen(model, state) == foreign(model, state) == []
        wrong = misshapen(model, {n: t[:-1] for n, t in state.items()})
        assert {text.split()[0] for text in wrong} == set(state)


@pytest.mark.parametrize("turned", [False, True])
def test_shapes_of_all_experts_in_one_tensor(harness, engine, turned):
    from beam_moe.integrations.vllm.weight_sync import foreign, misshapen

    e, i, h = harness.E, harness.I, harness.H
    tensors = {"gate_up_proj": torch.empty(e, 2 * i, h), "down_proj": torch.empty(e, h, i)}
    named = {f"{EXPERTS}.{n}": t.mT if turned else t for n, t in tensors.items()}
    assert misshapen(engine.model, named) == foreign(engine.model, named) == []
    named[f"{EXPERTS}.gate_up_proj"] = torch.empty(e, i, h)
    assert misshapen(engine.model, named) == [f"{EXPERTS}.gate_up_proj must have shape (8, 64, 64), got (8, 32, 64)"]
    packed = {f"{EXPERTS}.0.gate_proj.weight": torch.empty(i, h // 2, dtype=torch.uint8)}
    assert misshapen(engine.model, packed) == [], "two values a byte"


@pytest.mark.parametrize("declared", [True, False])
def test_a_router_that_did_not_come(harness, engine, declared):
    """Its bias too, which would keep its old value unseen where vLLM does not tell (a quantised base)."""
    from beam_moe.integrations.vllm.weight_sync import PARTLY, sync_weights

    state = checkpoint(harness)
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    sent = {k: v for k, v in state.items() if k != name}
    with pytest.raises(ValueError, match=rf"{name} did not come$") as refused:
        sync_weights(engine.llm, sent, declare_routers(state if declared else sent))
    assert PARTLY not in str(refused.value)


def test_routers_by_pefts_names_are_checked(harness, engine):
    """``base_layer`` in a router's name must not carry it past the comparison."""
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    name = "model.layers.2.mlp.gate.weight"
    peft = {f"base_model.model.{k}".replace("gate.weight", "gate.base_layer.weight"): v for k, v in state.items()}
    sync_weights(engine.llm, peft)
    assert torch.equal(engine.model.model.layers[2].mlp.gate.base_layer.weight, state[name])
    peft["base_model.model.model.layers.2.mlp.gate.base_layer.weight"] = state[name].bfloat16()
    with pytest.raises(ValueError, match=rf"{name} was declared bfloat16"):
        sync_weights(engine.llm, peft)


def test_a_router_that_no_rank_has(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import sync_weights

    state = checkpoint(harness)
    declared = declare_routers(state)
    declared["model.layers.9.mlp.gate.weight"] = declared["model.layers.2.mlp.gate.weight"]
    with pytest.raises(ValueError, match=r"no rank has model\.layers\.9\.mlp\.gate\.weight"):
        sync_weights(engine.llm, state, declared)


def test_checksums():
    """Bits, not values: a rounded, negated-zero or reshaped tensor differs; a copy on another dtype's path does not."""
    t = torch.randn(3, 4)
    assert checksum(t) == checksum(t.clone().t().contiguous().t())
    assert checksum(t) != checksum(t.bfloat16()) and checksum(t) != checksum(t.reshape(4, 3))
    assert checksum(torch.zeros(2)) != checksum(-torch.zeros(2))
    assert rounded_to_bf16(t.bfloat16()) and not rounded_to_bf16(t)
    assert check_routers({}, {"model.layers.0.mlp.gate.weight": t}, "here") == []


def test_values_that_bf16_represents_only_warn(caplog):
    name = "model.layers.0.mlp.gate.weight"
    t = torch.ones(2, 2)
    with caplog.at_level(logging.WARNING):
        assert check_routers(declare_routers({name: t}), {name: t}, "here") == [name]
    assert name in caplog.text


def test_report_names_the_kernel_of_each_layer(engine):
    [report] = engine.llm.collective_rpc("beam_moe_report")
    assert [r["layer"] for r in report["layers"]] == ["model.layers.2.mlp.experts", "model.layers.3.mlp.experts"]
    assert all(
        r["experts"] == "BeamTritonExperts" and r["ours_up_to_tokens"] == 512 and r["lora"] for r in report["layers"]
    )
    assert all(r["reason"] is None for r in report["layers"]) and isinstance(report["calls"], list)


# --- a reload that fails


def scheduled(tokens):
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


def breaks(engine, state, how, monkeypatch):
    """What makes the next reload fail once it has begun, as ``(weights to send, the error's words)``."""
    worker = engine.llm.workers[0]
    reload = worker.reload_weights
    name = "model.layers.3.post_attention_layernorm.weight"

    def reload_and_fail(weights_iterator):
        if how == "in the middle":
            reload((n, t[:7] if n == name else t) for n, t in weights_iterator)
        reload(weights_iterator)
        if how == "after vLLM forgot its adapters":
            raise RuntimeError("no memory")
        engine.model.model.layers[2].mlp.gate.base_layer.weight.data.add_(1)

    monkeypatch.setattr(worker, "reload_weights", reload_and_fail, raising=False)
    words = {"in the middle": r"weight sync: .*7", "after vLLM forgot its adapters": "no memory"}
    return state, words.get(how, r"mlp\.gate\.weight in the engine has checksum")


@pytest.mark.parametrize("how", ["in the middle", "after vLLM forgot its adapters", "with other router bits"])
def test_a_reload_that_fails_halfway(harness, engine, monkeypatch, how):
    """Its weights are of two versions: nothing runs on them, adapters stay, and a whole reload mends it."""
    from beam_moe.integrations.vllm.weight_sync import PARTLY, AdapterSync, sync_weights

    def adapter_is_there():
        experts = engine.model.moe_layers[0].routed_experts.quant_method.moe_kernel.impl.fused_experts
        slot = engine.manager._adapter_manager.lora_index_to_id.index(1)
        assert experts.ranks[slot] == 4 and experts.bank.enabled[slot] == 1
        assert engine.manager.list_adapters() == {1} and difference(harness, engine, 0) < LIMIT

    AdapterSync("policy", 1).update(engine.llm, harness.adapter_tensors("per_expert", seed=0), CONFIG)
    runner, state = engine.llm.workers[0].model_runner, checkpoint(harness)
    addresses = {n: p.data_ptr() for n, p in engine.model.named_parameters()}
    sent, words = breaks(engine, state, how, monkeypatch)
    with pytest.raises(ValueError, match=words) as failed:
        sync_weights(engine.llm, sent)
    assert PARTLY in str(failed.value)
    adapter_is_there()
    for _ in range(2):
        with pytest.raises(ValueError, match=PARTLY):
            runner.execute_model(scheduled(1))
    assert runner.execute_model(scheduled(0)) == "ran", "vLLM tells the runner of requests that ended"
    with pytest.raises(ValueError, match="lm_head did not come"):  # refused before it begins: nothing is mended
        sync_weights(engine.llm, {k: v for k, v in state.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match=PARTLY):
        runner.execute_model(scheduled(1))
    monkeypatch.undo()
    state = checkpoint(harness, seed=1)
    sync_weights(engine.llm, state)
    assert runner.execute_model(scheduled(1)) == "ran"
    adapter_is_there()
    assert addresses == {n: p.data_ptr() for n, p in engine.model.named_parameters()}, "graphs read the old addresses"
    for index, layer in enumerate(engine.model.moe_layers):
        for x in range(harness.E):
            want = state[f"model.layers.{harness.DENSE + index}.mlp.experts.{x}.down_proj.weight"]
            assert torch.equal(layer.routed_experts.w2_weight[x], want)
    assert torch.equal(engine.model.model.norm.weight, state["model.norm.weight"])


def test_a_reload_that_is_interrupted(harness, engine, monkeypatch):
    """By Ctrl-C, in the process of the engine."""
    from beam_moe.integrations.vllm.weight_sync import PARTLY, sync_weights

    worker, state = engine.llm.workers[0], checkpoint(harness)
    reload = worker.reload_weights

    def reload_half(weights_iterator):
        def half():
            yield from list(weights_iterator)[: len(state) // 2]
            raise KeyboardInterrupt

        reload(half())

    monkeypatch.setattr(worker, "reload_weights", reload_half, raising=False)
    with pytest.raises(KeyboardInterrupt):
        sync_weights(engine.llm, state)
    assert not held(worker)
    with pytest.raises(ValueError, match=f"interrupted; {PARTLY}"):
        worker.model_runner.execute_model(scheduled(1))
    monkeypatch.undo()
    sync_weights(engine.llm, state)
    assert worker.model_runner.execute_model(scheduled(1)) == "ran"
    assert torch.equal(engine.model.model.norm.weight, state["model.norm.weight"])


def test_a_reload_refused_at_once_keeps_the_engine_running(harness, engine):
    from beam_moe.integrations.vllm.weight_sync import PARTLY, sync_weights

    with pytest.raises(ValueError, match="lm_head did not come") as refused:
        sync_weights(engine.llm, {k: v for k, v in checkpoint(harness).items() if k != "lm_head.weight"})
    assert PARTLY not in str(refused.value)
    assert engine.llm.workers[0].model_runner.execute_model(scheduled(1)) == "ran"


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_one_rank_refuses_reach_none(harness, engine, first):
    """Before they are loaded, and in a way that leaves vLLM's executor in step with its workers."""
    from beam_moe.integrations.vllm.weight_sync import WeightSync, sync_weights

    class Refusing(WeightSync):
        refuses = True

        def beam_moe_check_weights(self, key, routers):
            if self.refuses:
                raise ValueError("this rank refuses")

        def beam_moe_update_weights(self, key, routers):
            return []

    refusing = Refusing()
    llm = QueuedEngine(*((refusing, *engine.llm.workers) if first else (*engine.llm.workers, refusing)))
    before, state = {n: p.clone() for n, p in engine.model.named_parameters()}, checkpoint(harness)
    with pytest.raises(ValueError, match="this rank refuses"):
        sync_weights(llm, state)
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())
    refusing.refuses = False
    sync_weights(llm, state)
    assert torch.equal(engine.model.model.norm.weight, state["model.norm.weight"])


@pytest.mark.parametrize("attempt", [True, False])
def test_requests_between_two_versions_are_refused(core, monkeypatch, attempt):
    """One by one, by the error of the reload, until one goes through; other errors refuse none."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from beam_moe.integrations.vllm.weight_sync import PARTLY, refuse_requests_between_versions

    refuse_requests_between_versions()
    core.mm_receiver_cache, core.request_block_hasher = None, None
    params = SamplingParams(max_tokens=1)
    request = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None)
    update = "beam_moe_update_weights"
    method, args = ("beam_moe_attempt", (update, "weights", {})) if attempt else (update, ("weights", {}))

    def answer(*errors):
        def call(*_):
            if attempt:
                return [([], error) for error in errors]
            if any(errors):
                raise RuntimeError(f"Worker failed with error '{next(filter(None, errors))}'")
            return [[] for _ in errors]

        core.model_executor.collective_rpc = call

    def send(method=method, args=args):
        return core.collective_rpc(method, args=args)

    answer("lm_head did not come", None)
    with pytest.raises((ValueError, RuntimeError), match="lm_head"):
        send()
    assert core.preprocess_add_request(request)[0].request_id == "r"
    answer(None, f"weight sync: no memory; {PARTLY}")
    with pytest.raises((ValueError, RuntimeError), match="no memory"):
        send()
    core.model_executor.collective_rpc = lambda *_: [1]
    send("beam_moe_stage", ("weights", b""))
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match=f"no memory; {PARTLY}"):
            core.preprocess_add_request(request)
    assert not core.resets
    answer(None, None)
    send()
    assert core.preprocess_add_request(request)[0].request_id == "r"
    assert core.resets == [(True, True)], "KV of the old weights, which running requests and connectors hold too"
    core.resettable = False
    with pytest.raises(ValueError, match="KV of the old weights"):
        send()
