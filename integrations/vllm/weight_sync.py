"""Weights from a trainer into a running vLLM engine: adapters from memory, full weights with checked routers.

The engine is started with ``worker_extension_cls="beam_moe.integrations.vllm.weight_sync.WeightSync"`` (``vllm serve
--worker-extension-cls ...``); a trainer then calls the methods of `WeightSync` by ``collective_rpc``, or lets
`AdapterSync` and `sync_weights` do it. Tensors travel as safetensors bytes: messages need no type, and the caller's
tensors are left alone.

A full reload that is refused before it begins changes nothing. Once begun there is no way back: the old weights are
overwritten where they lie. One that fails then leaves an engine that serves nothing until a whole reload has gone
through. Its loaded adapters stay.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from safetensors.torch import load, save

from beam_moe.env import BEAM
from beam_moe.weight_sync import check_routers, declare_routers, is_router

log = logging.getLogger("vllm.beam_moe")
EXTENSION = "beam_moe.integrations.vllm.weight_sync.WeightSync"
PIECE = 512 << 20
"""Most bytes of tensors in one message."""
PARTLY = "base weights are partly replaced, no request is served until a whole reload has gone through"
"""In the error of a reload that failed once it had begun, and of every use of the engine after it."""
EVERY_KV = {"reset_running_requests": True, "reset_connector": True}
"""For ``reset_prefix_cache``: running requests start over with the tokens they have, KV kept elsewhere goes too."""
KV_STAYS = "weight sync: the prefix cache could not be reset; KV of the old weights would be reused"
IN_MEMORY = "/beam-moe/in-memory/"
"""Start of the path in requests for an adapter that came from memory."""


def pieces(
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], limit: int = PIECE
) -> Iterator[bytes]:
    """Named tensors as safetensors bytes of at most ``limit`` bytes, or one tensor, each."""
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > limit:
            yield save(batch)
            batch, size = {}, 0
        # a copy of its own: safetensors refuses tensors that share memory, and the caller's must not be kept
        batch[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
    if batch:
        yield save(batch)


# --- in the worker


class WeightSync:
    """Mixed into vLLM's worker by ``worker_extension_cls``; ``collective_rpc`` calls a method on every worker."""

    model_runner: Any
    vllm_config: Any

    def beam_moe_stage(self, key: str, piece: bytes) -> int:
        """Keep a piece of tensors under ``key`` until a commit; how many tensors are there now."""
        staged: dict[str, dict[str, torch.Tensor]] = self.__dict__.setdefault("_beam_moe_staged", {})
        staged.setdefault(key, {}).update(load(piece))
        return len(staged[key])

    def beam_moe_discard(self, key: str) -> None:
        """Forget what was staged, prepared or kept of an earlier version under ``key``."""
        for kept in ("_beam_moe_staged", "_beam_moe_prepared", "_beam_moe_before"):
            self.__dict__.get(kept, {}).pop(key, None)

    def beam_moe_attempt(self, method: str, *args: Any) -> tuple[Any, str | None]:
        """Call a method; its result and None, or None and the text of its error.

        vLLM stops reading the workers' answers at the first error, and hands those left over to the calls after it.
        """
        try:
            return getattr(self, method)(*args), None
        except Exception as error:
            log.exception("%s failed", method)
            return None, str(error) or type(error).__name__

    def _staged(self, key: str, keep: bool = False) -> dict[str, torch.Tensor]:
        kept = self.__dict__.get("_beam_moe_staged", {})
        staged = kept.get(key) if keep else kept.pop(key, None)
        if staged is None:
            raise ValueError(f"weight sync: nothing was staged under {key!r}")
        return staged

    def _lora_manager(self) -> Any:
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is None:
            raise ValueError("weight sync: the engine runs without LoRA (enable_lora)")
        return manager

    def beam_moe_prepare_adapter(self, key: str, number: int, config: dict[str, Any]) -> list[str]:
        """Check the staged tensors as adapter ``number`` and keep them ready for `beam_moe_load_adapter`.

        Nothing that is loaded changes: called on every rank first, an adapter that one rank refuses reaches none.

        Args, returns, raises: as `beam_moe_load_adapter`.
        """
        lora = read_adapter(self._lora_manager(), number, self._staged(key), config)
        self.__dict__.setdefault("_beam_moe_prepared", {})[key] = lora
        return sorted(lora.loras)

    def beam_moe_load_adapter(self, key: str, number: int, config: dict[str, Any]) -> list[str]:
        """Make the staged tensors adapter ``number``, in place of a loaded one; the modules it changes on this rank.

        A rank of which the adapter changes nothing, as a pipeline stage may be, takes it too: requests name it there.
        After `beam_moe_prepare_adapter` the version before is kept for `beam_moe_restore_adapter`, until
        `beam_moe_discard`.

        Args:
            key: of `beam_moe_stage`.
            number: the ``lora_int_id`` of requests for it.
            config: as in ``adapter_config.json``: ``r``, ``lora_alpha``, ...

        Raises:
            ValueError: an adapter that does not fit; the one loaded before stays.
        """
        prepared = self.__dict__.get("_beam_moe_prepared", {}).pop(key, None)
        manager = self._lora_manager()
        if prepared is None or prepared.id != number:
            prepared = read_adapter(manager, number, self._staged(key), config)
        else:
            before = (loaded_adapters(manager), sent_adapters(manager).get(number))
            self.__dict__.setdefault("_beam_moe_before", {})[key] = before
        changed = sorted(prepared.loras)
        put_adapter(manager, prepared)
        sent_adapters(manager)[number] = prepared
        return changed

    def beam_moe_restore_adapter(self, key: str, number: int) -> None:
        """Undo a `beam_moe_load_adapter` that failed on this rank or another, half done or whole."""
        before = self.__dict__.get("_beam_moe_before", {}).pop(key, None)
        if before is not None:
            loaded, sent = before
            manager = self._lora_manager()
            # first: where the version before cannot be put back, a request finds it here, and not the one taken back
            if sent is None:
                sent_adapters(manager).pop(number, None)
            else:
                sent_adapters(manager)[number] = sent
            manager._adapter_manager.remove_adapter(number)
            put_back(manager, *loaded)

    def beam_moe_check_weights(self, key: str, routers: dict[str, dict[str, Any]]) -> None:
        """What `beam_moe_update_weights` checks before it loads anything, of tensors that stay staged.

        Called on every rank first, weights that one rank refuses reach none.
        """
        self._checked(self._staged(key, keep=True), routers)

    def _checked(self, staged: dict[str, torch.Tensor], routers: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Staged tensors by plain names; ValueError where this rank's weights or routers are not all among them, of
        another shape, or others are."""
        model = self.model_runner.get_model()
        tensors = {plain_name(n): t for n, t in staged.items()}
        routers = {plain_name(n): d for n, d in routers.items()}
        if absent := missing(model, tensors):
            raise ValueError(f"weight sync: the engine kept old weights: {shown(absent)} did not come")
        if strange := foreign(model, tensors):
            raise ValueError(f"weight sync: no layer takes {shown(strange)}")
        if wrong := misshapen(model, tensors):
            raise ValueError(f"weight sync: {shown(wrong)}")
        ours = {n for n in (*tensors, *router_parameters(model)) if is_router(n)}
        undeclared = sorted(n for n in ours if n not in routers)
        if undeclared:
            raise ValueError(f"router sync: {', '.join(undeclared)} came without a declaration")
        check_routers(routers, {n: t for n, t in tensors.items() if is_router(n)}, "arrived")
        return tensors

    def beam_moe_update_weights(self, key: str, routers: dict[str, dict[str, Any]]) -> list[str]:
        """Replace base weights by the staged ones (checkpoint names), keep loaded adapters, check routers.

        A failure after loading has begun (memory, a router that has other bits in the engine) leaves weights of both
        versions in the model. This rank then refuses to run it, with that error, until
        a call of this method goes through; adapters that were loaded are there before and after it.

        Args:
            key: of `beam_moe_stage`; plain checkpoint names or PEFT's with ``base_layer``.
            routers: from `declare_routers` of the sender.

        Returns:
            names of the routers whose bits were compared in this rank's parameters.

        Raises:
            ValueError: a weight or a router of this rank that did not come, or in another shape, or that no layer
                takes; a router that was not declared, is not fp32 or has other bits: before anything is loaded. Or,
                naming `PARTLY`, whatever went wrong after that.
        """
        model = self.model_runner.get_model()
        tensors = self._checked(self._staged(key), routers)  # again: it may be called by itself, or more has come
        self._serve(f"weight sync: interrupted; {PARTLY}")
        try:
            with adapters_kept(getattr(self.model_runner, "lora_manager", None)):
                try:
                    with nothing_left_behind():
                        self.reload_weights(  # type: ignore[attr-defined]
                            weights_iterator=checkpoint_names(model, tensors)
                        )
                except BaseException:
                    abandon_reload(model)
                    raise
            compared = self.beam_moe_check_routers(routers)
        except Exception as error:
            refusal = f"weight sync: {str(error).removeprefix('weight sync: ') or type(error).__name__}; {PARTLY}"
            self._serve(refusal)
            raise ValueError(refusal) from error
        self._serve(None)
        return compared

    def _serve(self, refusal: str | None) -> None:
        """Have this rank run its model, or raise ``refusal`` instead, captured graphs included."""
        runner = self.model_runner
        if "_beam_moe_execute" in self.__dict__:
            runner.execute_model = self.__dict__.pop("_beam_moe_execute")
        if refusal is None:
            return

        execute = self.__dict__["_beam_moe_execute"] = runner.execute_model

        def refuse(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens > 0:
                raise ValueError(refusal)
            return execute(scheduled, *args, **kwargs)  # news of requests that ended

        runner.execute_model = refuse

    def beam_moe_check_routers(self, routers: dict[str, dict[str, Any]]) -> list[str]:
        """Compare this rank's router parameters with the sender's declaration; the names compared."""
        routers = {plain_name(n): d for n, d in routers.items()}
        return check_routers(routers, router_parameters(self.model_runner.get_model()), "in the engine")

    def beam_moe_report(self) -> dict[str, Any]:
        """What serves each MoE layer of this rank, and the counts of calls."""
        from beam_moe.integrations.vllm.report import report

        return report(self.model_runner.get_model())


def shown(names: list[str]) -> str:
    """The first few of what may be thousands."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


EXPERT = re.compile(r"(\.experts\.\d+\.[a-z]+_proj)\.weight")


def plain_name(name: str) -> str:
    """A checkpoint's name of what PEFT may call ``base_model.model.model.layers.0...base_layer.weight``."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def checkpoint_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of plain checkpoint names by the names that ``model``'s loader takes.

    Once LoRA wraps an MoE layer, vLLM's loader knows its experts only as ``experts.0.gate_proj.base_layer.weight`` and
    passes over any other name without an error.
    """
    from vllm.model_executor.layers.fused_moe import MoERunner

    wrapped = any(m.routed_experts.lora_base_layer_prefix for m in model.modules() if isinstance(m, MoERunner))
    for name, tensor in tensors.items():
        yield EXPERT.sub(r"\1.base_layer.weight", name) if wrapped else name, tensor


def missing(model: Any, names: Collection[str]) -> list[str]:
    """What this rank's part of ``model`` holds weights of and ``names``, plain checkpoint names, do not, sorted.

    vLLM joins projections and experts into one parameter and counts it as loaded with the first of them: the others
    would then be whatever lay in its memory.
    """
    from vllm.model_executor.layers.fused_moe import MoERunner

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    came = set(names if mapper is None else mapper.get_rename_mapper().apply_list(list(names)))
    modules = {n.rpartition(".")[0] for n in came}
    packed = getattr(model, "packed_modules_mapping", {})
    absent = set()
    for full, _ in model.named_parameters():
        name = plain_name(full)
        module, _, parameter = name.rpartition(".")
        parent, dot, last = module.rpartition(".")
        if parameter == "weight" and module not in modules:
            absent |= {f"{parent}{dot}{part}" for part in packed.get(last, [last])} - modules
        elif parameter != "weight" and is_router(name) and name not in came:
            absent.add(name)
    for runner in (m for m in model.modules() if isinstance(m, MoERunner)):
        layer, experts = runner.layer_name, runner.routed_experts
        if any(n.startswith(f"{layer}.") and not n[len(layer) + 1 :].split(".")[0].isdigit() for n in came):
            continue  # all experts in one tensor
        parts = (experts.ckpt_gate_proj_name, experts.ckpt_up_proj_name, experts.ckpt_down_proj_name)
        numbers = range(runner.moe_config.num_logical_experts)
        absent |= {f"{layer}.{i}.{part}" for i in numbers for part in filter(None, parts)} - modules
    return sorted(absent)


def foreign(model: Any, names: Collection[str]) -> list[str]:
    """Those of ``names``, plain checkpoint names, that no layer takes on any rank, sorted: adapters' factors, and in
    Beam what belongs to no module of it.

    vLLM's loader of Beam raises at such a name once it has loaded what came before, and passes over an expert. Other
    models' loaders leave out parts of a checkpoint on purpose.
    """
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.models.utils import PPMissingLayer

    adapters = {n for n in names if ".lora_" in n}
    if type(model).__name__ != BEAM:
        return sorted(adapters)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = None if mapper is None else mapper.get_rename_mapper().map_name
    packed = getattr(model, "packed_modules_mapping", {})
    known, elsewhere = set(), []
    for full, module in model.named_modules(remove_duplicate=False):
        name = plain_name(full)
        parent, dot, last = name.rpartition(".")
        known |= {name, *(f"{parent}{dot}{part}" for part in packed.get(last, []))}
        if isinstance(module, MoERunner):
            known |= {n.removesuffix(".weight") for n in expert_shapes(module)}
        elif isinstance(module, PPMissingLayer):
            elsewhere.append(f"{name}.")
    known.discard("")
    strange = set()
    for name in names:
        here = name if rename is None else rename(name)
        if here.rpartition(".")[0] not in known and not here.startswith(tuple(elsewhere)):
            strange.add(name)
    return sorted(strange | adapters)


Shape = tuple[int, ...]


def expert_shapes(runner: Any) -> dict[str, Shape]:
    """A checkpoint's shapes of one MoE layer's experts, one by one and all in one tensor, by plain names."""
    experts, moe, layer = runner.routed_experts, runner.moe_config, runner.layer_name
    count, inner, hidden = moe.num_logical_experts, moe.intermediate_size, moe.hidden_dim_unpadded
    up, down = (inner, hidden), (hidden, inner)
    parts = {experts.ckpt_gate_proj_name: up, experts.ckpt_up_proj_name: up, experts.ckpt_down_proj_name: down}
    shapes: dict[str, Shape] = {f"{layer}.down_proj": (count, *down)}
    if experts.ckpt_up_proj_name:
        shapes[f"{layer}.gate_up_proj"] = (count, 2 * inner, hidden)
    return shapes | {f"{layer}.{i}.{p}.weight": s for i in range(count) for p, s in parts.items() if p}


def whole_shapes(model: Any) -> dict[str, Shape]:
    """The shapes of a checkpoint's tensors, not of a rank's part, by the names that `missing` compares.

    Of what vLLM's layers know the size of: experts, linears, embeddings and vectors. Other parameters its loader may
    bring from another shape, and refuses itself.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from beam_moe.integrations.vllm.adapters import output_sizes

    packed = getattr(model, "packed_modules_mapping", {})
    shapes: dict[str, Shape] = {}
    for full, module in model.named_modules(remove_duplicate=False):
        name = plain_name(full)
        parent, dot, last = name.rpartition(".")
        weight = getattr(module, "weight", None)
        if isinstance(module, MoERunner):
            shapes |= expert_shapes(module)
        elif isinstance(module, VocabParallelEmbedding):
            shapes[f"{name}.weight"] = (module.org_vocab_size, module.embedding_dim)
        elif isinstance(module, LinearBase) and isinstance(weight, torch.Tensor) and weight.dim() == 2:
            parts, rows = packed.get(last, [last]), output_sizes(module)
            sizes = {f"{parent}{dot}{p}": n for p, n in zip(parts, rows)} if len(parts) == len(rows) else {}
            for linear, size in {name: sum(rows), **sizes}.items():
                shapes |= {f"{linear}.weight": (size, module.input_size), f"{linear}.bias": (size,)}
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, UnquantizedLinearMethod):
            continue
        for own, vector in module.named_parameters(prefix=name, recurse=False):
            loader = getattr(vector, "weight_loader", None)
            sharded = getattr(loader, "__qualname__", "").startswith("sharded_weight_loader.")
            if vector.dim() == 1 and (loader is None or sharded):
                whole = vector.numel() * (get_tensor_model_parallel_world_size() if sharded else 1)
                shapes.setdefault(own, (whole,))
    return shapes


def misshapen(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with those of ``tensors``, by plain checkpoint names, that differ from `whole_shapes`.

    vLLM copies too few rows or columns of an expert into a corner of its parameter, repeats a single one, and of other
    weights leaves out what is too much.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = None if mapper is None else mapper.get_rename_mapper().map_name
    shapes, wrong = whole_shapes(model), []
    for name, tensor in tensors.items():
        got, want = tuple(tensor.shape), shapes.get(name if rename is None else rename(name))
        if want is None or not tensor.is_floating_point():  # packed bits have shapes of their own
            continue
        if got == want or (len(want) == 3 and got == (want[0], want[2], want[1])):  # some loaders turn all experts
            continue
        if tensor.numel() != 1 or want != (1,):  # vLLM takes a scalar for a vector of one
            wrong.append(f"{name} must have shape {want}, got {got}")
    return wrong


@contextmanager
def adapters_kept(manager: Any) -> Iterator[None]:
    """Put back what a reload makes vLLM forget, also one that fails: adapters' factors are whole in host memory."""
    if manager is None:
        yield
        return
    before = loaded_adapters(manager)
    try:
        yield
    finally:
        put_back(manager, *before)


def loaded_adapters(manager: Any) -> tuple[list[Any], list[int]]:
    """The ``LoRAModel`` of every adapter in host memory, least recently used first, and the numbers of active ones."""
    inner = manager._adapter_manager
    return list(inner._registered_adapters.cache.values()), [i for i in inner.lora_index_to_id if i is not None]


def put_back(manager: Any, adapters: Iterable[Any], active: Iterable[int]) -> None:
    """Load what `loaded_adapters` returned, as far as it is gone."""
    inner = manager._adapter_manager
    for adapter in adapters:
        inner.add_adapter(adapter)
    for number in active:
        inner.activate_adapter(number)


def abandon_reload(model: torch.nn.Module) -> None:
    """Give layers that a failed reload did not reach their old tensors back, and forget what it had taken in.

    vLLM leaves them without memory, and would count the tensors of the next reload on top of this one's.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Turn vLLM's warnings about parameters that a reload did not reach into a ValueError that names them."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "not loaded from checkpoint" in text or text.startswith("RoutedExperts: Failed"):
                found.append(text)

    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(f"vllm.model_executor.model_loader.reload.{n}") for n in ("inplace", "layerwise")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))  # VLLM_LOGGING_LEVEL may be above
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.removeHandler(listener)
            logger.setLevel(level)
    if found:
        raise ValueError("weight sync: the engine kept old weights: " + "; ".join(dict.fromkeys(found)))


def router_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's router parameters by checkpoint name, whether or not LoRA wraps them."""
    return {plain_name(n): p for n, p in model.named_parameters() if is_router(plain_name(n))}


def read_adapter(manager: Any, number: int, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """As vLLM's worker reads an adapter from a folder, from tensors that become the adapter's own: its ``LoRAModel``.

    Raises:
        ValueError: an adapter that does not fit, naming the module.
    """
    from vllm.lora.lora_model import _is_remote_expert_key
    from vllm.lora.peft_helper import PEFTHelper

    from beam_moe.integrations.vllm.adapters import refuse_leftovers

    inner = manager._adapter_manager
    helper = PEFTHelper.from_dict({"target_modules": "all-linear", **config})
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    spec = inner.moe_ep_load_spec

    def elsewhere(name: str) -> bool:
        """Whether another rank has this expert; one that no rank has stays, to be refused."""
        if spec is None or not _is_remote_expert_key(name, spec):
            return False
        return int(name.split(".experts.", 1)[1].split(".", 1)[0]) < spec.global_num_experts

    lora = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=number,
        tensors={n: t for n, t in tensors.items() if not elsewhere(n)},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        skip_prefixes=getattr(inner.model, "lora_skip_prefixes", None),
    )
    inner._validate_moe_lora_format(lora)
    if not inner.supports_mm:  # whose adapters may leave out the language model's prefix
        refuse_leftovers(inner, lora)
    return lora


def put_adapter(manager: Any, lora: Any) -> None:
    """Load a ``LoRAModel`` as vLLM's worker does, in place of one of the same number."""
    inner = manager._adapter_manager
    inner.remove_adapter(lora.id)
    if len(inner) + 1 > inner.capacity:
        inner.remove_oldest_adapter()
    inner.add_adapter(lora)
    inner.activate_adapter(lora.id)


def sent_adapters(manager: Any) -> dict[int, Any]:
    """The ``LoRAModel`` of every adapter that came from memory and was not removed, by number.

    vLLM drops adapters for others (``max_cpu_loras``) and when base weights are replaced, and reads them anew once a
    request names them. One from memory has no folder: it is taken from here then.
    """
    sent: dict[int, Any] | None = manager.__dict__.get("_beam_moe_sent")
    if sent is not None:
        return sent
    sent = manager._beam_moe_sent = {}
    read, remove = manager._load_adapter, manager.remove_adapter

    def load_adapter(request: Any) -> Any:
        lora = sent.get(request.lora_int_id) if request.lora_path.startswith(IN_MEMORY) else None
        return read(request) if lora is None else lora

    def remove_adapter(number: int) -> bool:
        sent.pop(number, None)
        return remove(number)

    manager._load_adapter, manager.remove_adapter = load_adapter, remove_adapter
    return sent


# --- adapters from a folder, in the worker


def load_step(worker: Any, step: Callable[[Any, Any], Any], request: Any) -> tuple[Any, str | None]:
    """A step of `load_on_every_rank_or_none`; its result and None, or None and the text of its error."""
    try:
        worker.model_runner._ensure_lora_enabled()
        return step(worker.model_runner.lora_manager, request), None
    except Exception as error:
        log.exception("loading an adapter: %s failed", step.__name__)
        return None, str(error) or type(error).__name__


def _read(manager: Any, request: Any) -> None:
    held = request.lora_int_id in manager.list_adapters() and not request.load_inplace
    manager._beam_moe_read = None if held else manager._load_adapter(request)


def _load(manager: Any, request: Any) -> bool:
    if manager._beam_moe_read is None:
        return manager.add_adapter(request)
    manager._beam_moe_replaced = loaded_adapters(manager)
    put_adapter(manager, manager._beam_moe_read)
    return True


def _take_back(manager: Any, request: Any) -> None:
    before = manager.__dict__.get("_beam_moe_replaced")
    _forget(manager, request)
    if before is not None:
        manager._adapter_manager.remove_adapter(request.lora_int_id)
        put_back(manager, *before)


def _forget(manager: Any, request: Any) -> None:
    for kept in ("_beam_moe_read", "_beam_moe_replaced"):
        manager.__dict__.pop(kept, None)


# --- at the caller


STOPPED = (Exception, asyncio.CancelledError, KeyboardInterrupt)
"""What a sync may end by. The engine may still be at the call that was awaited, and takes the next ones after it."""
Calls = Generator[tuple[str, tuple[Any, ...]], list[Any], Any]
"""Calls of every worker by ``collective_rpc``: method and arguments. Each is sent what the workers answered."""


def first_error(results: Iterable[tuple[Any, str | None]]) -> str | None:
    """The first error among what `WeightSync.beam_moe_attempt` answered on every rank, None when there is none.

    One of a reload that had begun comes first: it tells what state the engine is in.
    """
    errors = [error for _, error in results if error is not None]
    return next((e for e in errors if PARTLY in e), errors[0] if errors else None)


def results_of(answers: Iterable[tuple[Any, str | None]]) -> list[Any]:
    """What each rank's attempt returned; the first error of any as a ValueError."""
    answers = list(answers)
    error = first_error(answers)
    if error is not None:
        raise ValueError(error)
    return [result for result, _ in answers]


def attempt(method: str, *args: Any) -> Calls:
    """One call of `WeightSync.beam_moe_attempt`; what `results_of` says of it."""
    return results_of((yield "beam_moe_attempt", (method, *args)))


def discard(key: str) -> Calls:
    """Free what failed calls left in the workers; an engine that cannot even do that has said why before."""
    with suppress(Exception):
        yield "beam_moe_discard", (key,)


def refusal(error: BaseException) -> BaseException:
    """An error of the engine: vLLM's client of an engine in another process makes an ``Exception`` of any."""
    text = str(error).removeprefix("Call to collective_rpc method failed: ")
    return ValueError(text) if type(error) is Exception else error


def make_calls(calls: Calls, llm: Any) -> Any:
    """Make ``calls`` of an ``LLM`` until they return."""
    step = partial(next, calls)
    try:
        while True:
            method, args = step()
            try:
                step = partial(calls.send, llm.collective_rpc(method, args=args))
            except STOPPED as error:
                step = partial(calls.throw, refusal(error))
    except StopIteration as end:
        return end.value


async def make_calls_async(calls: Calls, engine: Any) -> Any:
    """`make_calls` for an ``AsyncLLM``."""
    step = partial(next, calls)
    try:
        while True:
            method, args = step()
            try:
                step = partial(calls.send, await engine.collective_rpc(method, args=args))
            except STOPPED as error:
                step = partial(calls.throw, refusal(error))
    except StopIteration as end:
        return end.value


class AdapterSync:
    """One adapter that a trainer updates in a running engine, and the requests that use it.

    KV blocks of one version are never read by another: vLLM's block hashes know an adapter's name and path, and the
    path of `request` names the version. Requests that run while an update lands keep their own.

        sync = AdapterSync("policy", 1)
        request = sync.update(llm, tensors, {"r": 32, "lora_alpha": 32})  # or: await sync.update_async(engine, ...)
        llm.generate(prompts, params, lora_request=request)
    """

    def __init__(self, name: str, number: int) -> None:
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"AdapterSync: number must be an integer of at least 1, got {number!r}")
        self.name, self.number, self.generation = name, number, 0
        self._updating = asyncio.Lock()

    @property
    def request(self) -> Any:
        """The LoRARequest of the current version."""
        from vllm.lora.request import LoRARequest

        if self.generation == 0:
            raise ValueError(f"AdapterSync: {self.name} has not been sent yet")
        return LoRARequest(self.name, self.number, f"{IN_MEMORY}{self.name}/{self.generation}")

    def _calls(self, tensors: Any, config: dict[str, Any]) -> Calls:
        key, loading = f"adapter/{self.number}", False
        try:
            yield "beam_moe_discard", (key,)
            for piece in pieces(tensors):
                yield from attempt("beam_moe_stage", key, piece)
            changed = yield from attempt("beam_moe_prepare_adapter", key, self.number, config)
            if not any(changed):
                raise ValueError(f"AdapterSync: {self.name} changes no module on any rank")
            loading = True
            yield from attempt("beam_moe_load_adapter", key, self.number, config)
        except STOPPED:
            try:
                if loading:
                    yield from attempt("beam_moe_restore_adapter", key, self.number)
            finally:
                yield from discard(key)
            raise
        self.generation += 1
        yield "beam_moe_discard", (key,)
        return self.request

    def update(self, llm: Any, tensors: Any, config: dict[str, Any]) -> Any:
        """Send a new version to an ``LLM``; the request to use from now on.

        Args:
            llm: anything with a blocking ``collective_rpc``.
            tensors: PEFT names and tensors, a mapping or pairs, in any layout that `adapters` knows; left as they are.
            config: as in ``adapter_config.json``: ``r``, ``lora_alpha``, ...

        Raises:
            ValueError: an adapter that a rank refuses, in its words, or that changes no module on any. Every rank keeps
                the version before, also where one fails while it loads.
        """
        return make_calls(self._calls(tensors, config), llm)

    async def update_async(self, engine: Any, tensors: Any, config: dict[str, Any]) -> Any:
        """`update` for an ``AsyncLLM``; updates that overlap land one after another, one that is cancelled not at all
        or, at its very end, whole."""
        async with self._updating:
            return await make_calls_async(self._calls(tensors, config), engine)


def _weight_calls(tensors: Any, routers: dict[str, Any] | None) -> Calls:
    """The calls of `sync_weights`; which routers each rank compared, and those stated."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    named: Iterable[tuple[str, torch.Tensor]] = ((plain_name(n), t) for n, t in items)
    if routers is None:
        named = list(named)
        routers = declare_routers(named)
    stated = {plain_name(n): d for n, d in routers.items()}
    try:
        yield "beam_moe_discard", ("weights",)
        for piece in pieces(named):  # one at a time: a checkpoint may be most of the host's memory
            yield from attempt("beam_moe_stage", "weights", piece)
        yield from attempt("beam_moe_check_weights", "weights", stated)
        compared = yield from attempt("beam_moe_update_weights", "weights", stated)
    except STOPPED:
        yield from discard("weights")
        raise
    return compared, stated


def _all_compared(results: list[list[str]], stated: Mapping[str, Any]) -> None:
    missed = sorted(set(stated) - {name for names in results for name in names})
    if missed:
        raise ValueError(f"router sync: no rank has {', '.join(missed)}")


def sync_weights(llm: Any, tensors: Any, routers: dict[str, Any] | None = None) -> None:
    """Replace an engine's base weights, check every router on the engine's side, drop the KV of the old weights.

    Requests that run meanwhile start over, by the new weights, with the tokens they have. Each worker holds the whole
    checkpoint in host memory until it is loaded or refused.

    Args:
        llm: an ``LLM``.
        tensors: the whole checkpoint, plain checkpoint names or PEFT's with ``base_layer``; left as they are.
        routers: `declare_routers` of the trainer's own tensors. Without it the tensors given here are declared, which
            proves only that nothing was lost from here on.

    Raises:
        ValueError: a weight or a router that did not come, or in another shape, or that no layer takes; a router that
            was not declared, not fp32, came with other bits, or that no rank has; a prefix cache that stays. What one
            rank refuses at once reaches none. An error that names `PARTLY` came later: it refuses requests, and ends
            the engine where some run or wait already, until another `sync_weights` goes through. Loaded adapters stay.
    """
    compared, stated = make_calls(_weight_calls(tensors, routers), llm)
    # The engine's core has done so before its next step, where it has the plugin. Where VLLM_PLUGINS or vLLM's version
    # keeps it out, this is the only reset, and which of the two is the case no worker of another process knows.
    if not llm.reset_prefix_cache(**EVERY_KV):
        raise ValueError(KV_STAYS)
    _all_compared(compared, stated)


async def sync_weights_async(engine: Any, tensors: Any, routers: dict[str, Any] | None = None) -> None:
    """`sync_weights` for an ``AsyncLLM``; syncs that overlap land one after another."""
    async with engine.__dict__.setdefault("_beam_moe_syncing", asyncio.Lock()):
        compared, stated = await make_calls_async(_weight_calls(tensors, routers), engine)
        if not await engine.reset_prefix_cache(**EVERY_KV):
            raise ValueError(KV_STAYS)
    _all_compared(compared, stated)


# --- in the engine's own process


def load_on_every_rank_or_none() -> None:
    """Wrap the engine's loading of an adapter from a folder, as ``load_lora_adapter`` asks for it. Re-entrant.

    vLLM lets each rank load by itself: where one refuses, others serve the new version under the name of the old one,
    and the answers of the ranks behind it are taken for those to later calls, of which the next step may be one.
    """
    from vllm.v1.engine.core import EngineCore

    add_lora = EngineCore.add_lora
    if getattr(add_lora, "__beam_moe_steps__", False):
        return

    @wraps(add_lora)
    def adding(self: Any, lora_request: Any) -> bool:
        def every_rank(step: Callable[[Any, Any], Any]) -> list[Any]:
            return results_of(self.model_executor.collective_rpc(load_step, args=(step, lora_request)))

        try:
            every_rank(_read)
            loaded = all(every_rank(_load))
        except Exception:
            every_rank(_take_back)
            raise
        every_rank(_forget)
        return loaded

    adding.__beam_moe_steps__ = True  # type: ignore[attr-defined]
    EngineCore.add_lora = adding  # type: ignore[method-assign]


def refuse_requests_between_versions() -> None:
    """Wrap the engine's calls of its workers and its taking of requests: none is taken while base weights are partly
    replaced, nor is that known to some workers only, and new base weights meet no KV of the old ones. Re-entrant."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.core import EngineCore

    rpc, preprocess = EngineCore.collective_rpc, EngineCore.preprocess_add_request
    if getattr(preprocess, "__beam_moe__", False):
        return

    @wraps(rpc)
    def calling(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        attempt = method == "beam_moe_attempt"
        updates = (args[0] if attempt and args else method) == "beam_moe_update_weights"
        try:
            result = rpc(self, method, timeout, args, kwargs)
            error = first_error(result) if attempt else None
            if error is not None:  # here, where the workers of one replica are all there is
                raise ValueError(error)
        except Exception as error:
            if updates and PARTLY in str(error):
                self._beam_moe_refusal = str(error)
            raise
        if updates:
            self._beam_moe_refusal = None
            if not self.reset_prefix_cache(**EVERY_KV):  # here, before another step runs
                raise ValueError(KV_STAYS)
        return result

    @wraps(preprocess)
    def preprocessing(self: Any, request: Any) -> Any:
        refusal = getattr(self, "_beam_moe_refusal", None)
        if refusal is not None:
            raise VLLMValidationError(refusal)
        return preprocess(self, request)

    preprocessing.__beam_moe__ = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc, EngineCore.preprocess_add_request = calling, preprocessing  # type: ignore[method-assign]
