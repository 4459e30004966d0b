"""Router replay (R3): the trainer computes with the experts that the engine chose, at any pipeline stage.

Engine and trainer round differently, so near ties route differently, and a token through other experts has another
probability. megatron-core can replay routes (``moe_enable_routing_replay``); added here is which of the engine's layers
belongs to which router of this pipeline stage, rows in Megatron's order, and recomputation in the backward pass.

Each forward-backward schedule runs in `replaying`, each micro-batch's model call goes through `forward`::

    with replaying(chunks):
        get_forward_backward_func()(forward_step_func=step, model=chunks, ...)

    def step(batches, model):
        batch = next(batches)
        output = forward(model, batch.routes, batch.ids, batch.positions, batch.mask)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import unwrap_model

from beam_moe import env


def stage_routers(chunk) -> list[tuple[int, TopKRouter]]:
    """``(layer, router)`` of every MoE layer of a chunk, in order; ``layer`` is the model's own, 0-based and global.

    A ``GPTModel`` has one layer per layer. A ``HybridModel`` counts attention and MLP separately, so that layer ``i``
    of the model has its MoE at hybrid layer ``2 i + 2``.

    Raises:
        ValueError: a router without replay, because the model was built without ``moe_enable_routing_replay``.
    """
    model = unwrap_model(chunk)
    per_layer = 2 if isinstance(model, HybridModel) else 1
    found = []
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            if module.router_replay is None:
                raise ValueError(f"replay: moe_enable_routing_replay must be True when the model is built, for {name}")
            found.append((module.layer_number // per_layer - 1, module))
    return found


def layer_column(layer: int, columns: int, config) -> int:
    """Where ``layer`` is among the ``columns`` layers of captured routes: all layers, or the MoE layers alone.

    Raises:
        ValueError: ``columns`` is neither count.
    """
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(i % frequency == 0) for i in range(config.num_layers)]
    if columns == len(frequency):
        return layer
    if columns == sum(frequency):
        return sum(frequency[:layer])
    raise ValueError(
        f"replay: routes must have {len(frequency)} layers, or the {sum(frequency)} that are MoE, got {columns}"
    )


def megatron_rows(routes: torch.Tensor) -> torch.Tensor:
    """Batch-major routes ``(B, S, layers, top_k)`` as rows ``(S B, layers, top_k)``: hidden states are (S, B)."""
    if routes.dim() != 4:
        raise ValueError(f"replay: routes must be (B, S, layers, top_k), got {tuple(routes.shape)}")
    return routes.transpose(0, 1).flatten(0, 1)


def _get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
    """megatron-core's, except that rows of -1, tokens whose route is unknown, are routed as if there were no replay."""
    action, target = self.router_replay_action, None
    if action == RouterReplayAction.REPLAY_FORWARD:
        target = self.target_topk_idx
    elif action == RouterReplayAction.REPLAY_BACKWARD:
        target = self.replay_backward_list.pop(0)
    if target is None:
        return _original(self, scores, topk, num_groups, group_topk, default_compute_topk)
    target = target.to(scores.device)
    if target.shape != (scores.shape[0], topk):
        raise ValueError(
            f"replay: layer {self.layer_number} routes {scores.shape[0]} rows to {topk} experts, got routes "
            f"{tuple(target.shape)}"
        )
    if getattr(self, "beam_moe_unknown_rows", False):
        _, live = default_compute_topk(scores, topk, num_groups, group_topk)
        target = torch.where(target < 0, live, target)
    return scores.gather(1, target), target


_original = RouterReplay.get_replay_topk


def install() -> None:
    """Let megatron-core's replay take rows of -1. Idempotent."""
    RouterReplay.get_replay_topk = _get_replay_topk


def _check_rows(layer: int, rows: torch.Tensor) -> None:
    low_to_high = rows.to(torch.int64).sort(-1)[0]
    twice = (low_to_high.diff() == 0) | (low_to_high[:, :-1] < 0)  # -1 beside an expert too
    bad = (twice.any(-1) & (low_to_high[:, -1] >= 0)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"replay: a row of routes must be different experts, or -1 throughout (padding, a token without a route), "
            f"got {rows[row].tolist()} in row {row} of layer {layer}"
        )


def set_routes(chunk, routes: torch.Tensor) -> None:
    """Make the next forward pass of ``chunk`` use ``routes``; a later recomputation of it will too.

    Args:
        chunk: this rank's model chunk, wrapped or not.
        routes: integer ``(B, S, layers, top_k)`` of the whole batch, or rows ``(T, layers, top_k)`` in Megatron's order
            (packed sequences), for all layers of the model or for its MoE layers. Every rank gets the same: a stage
            takes its layers, a sequence-parallel rank its rows. A row of -1: route that token live; so are tokens of
            padding given, since megatron-core fails on a row that names an expert twice.

    Raises:
        ValueError: a shape that does not fit the model; with ``BEAM_MOE_CHECK=1`` also an id that is no expert, or a
            row that is neither ``top_k`` different ones nor -1 throughout.
    """
    config = unwrap_model(chunk).config
    rows = megatron_rows(routes) if routes.dim() == 4 else routes
    if rows.dim() != 3 or rows.shape[2] != config.moe_router_topk or rows.dtype.is_floating_point:
        raise ValueError(
            f"replay: routes must be integers of shape (..., layers, {config.moe_router_topk}), got {routes.dtype} "
            f"{tuple(routes.shape)}"
        )
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if config.sequence_parallel and tp > 1:
        if rows.shape[0] % tp:
            raise ValueError(f"replay: rows of routes must divide by tensor parallel size {tp}, got {rows.shape[0]}")
        rows = rows.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    unknown = rows.dtype.is_signed  # unsigned ids have no -1
    if env.flag("CHECK") and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < -1 or high >= config.num_moe_experts:
            raise ValueError(f"replay: routes must be in -1..{config.num_moe_experts - 1}, got {low}..{high}")
    for layer, router in stage_routers(chunk):
        column = layer_column(layer, rows.shape[1], config)
        if env.flag("CHECK"):
            _check_rows(layer, rows[:, column])
        replay = router.router_replay
        replay.beam_moe_unknown_rows = unknown
        replay.set_target_indices(rows[:, column].to(torch.int64))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _act(chunk, action: RouterReplayAction | None) -> None:
    for _, router in stage_routers(chunk):
        router.router_replay.set_router_replay_action(action)


def forward(chunk, routes: torch.Tensor | None, *args, **kwargs):
    """``chunk(*args, **kwargs)`` with ``routes`` (see `set_routes`), in the recomputation of its backward pass too.

    None for ``routes``: the routers choose, also between micro-batches that have routes.
    """
    if routes is None and not unwrap_model(chunk).config.moe_enable_routing_replay:
        return chunk(*args, **kwargs)
    if routes is None:
        _act(chunk, None)
    else:
        set_routes(chunk, routes)
    output = chunk(*args, **kwargs)

    def recompute(_):
        _act(chunk, None if routes is None else RouterReplayAction.REPLAY_BACKWARD)

    if output.requires_grad:
        output.register_hook(recompute)  # runs as this micro-batch's backward pass begins
    return output


def _clear(chunks) -> None:
    for chunk in chunks:
        for _, router in stage_routers(chunk):
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()


@contextmanager
def replaying(chunks: Sequence) -> Iterator[None]:
    """Around one forward-backward schedule: no routes of another are left before it, after it, or on error."""
    _clear(chunks)
    try:
        yield
    finally:
        _clear(chunks)


@contextmanager
def recording(chunks: Sequence) -> Iterator[dict[int, torch.Tensor]]:
    """Around one forward pass: what this stage's routers chose, ``{layer: int64 (rows, top_k)}``, filled on exit."""
    _clear(chunks)
    chosen: dict[int, torch.Tensor] = {}
    for chunk in chunks:
        _act(chunk, RouterReplayAction.RECORD)
    try:
        yield chosen
        for chunk in chunks:
            for layer, router in stage_routers(chunk):
                chosen[layer] = router.router_replay.get_recorded_indices()
    finally:
        _clear(chunks)
