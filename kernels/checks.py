"""What every kernel asks of its operands whatever it computes; each refusal is a ``ValueError`` before any launch."""

import os

import torch

# Triton reads it when a kernel is decorated: set later, it comes too late.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def reaches(device: torch.device) -> bool:
    """Whether a kernel reaches memory of ``device``: a GPU's, or the CPU's in Triton's interpreter; not ``meta``."""
    return device.type == "cuda" or (
        device.type == "cpu" and _INTERPRETED and os.environ.get("TRITON_INTERPRET") == "1"
    )


def require_device(op: str, name: str, t: torch.Tensor) -> None:
    """``t`` lies where a kernel reaches it."""
    if not reaches(t.device):
        raise ValueError(
            f"{op}: {name} must be on a GPU (or on the CPU, with TRITON_INTERPRET=1 set before beam_moe's kernels are "
            f"imported), got {t.device}"
        )


def require_ends(op: str, offsets: torch.Tensor, rows: int) -> None:
    """``offsets`` is 0, then the end of each group of ``rows`` rows; reads the device, hence with BEAM_MOE_CHECK=1."""
    ends = offsets.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > rows:
        raise ValueError(f"{op}: offsets must be 0, then ends that never fall, at most {rows} rows, got {ends}")


def refuse_gradient(op: str, trains: str, **tensors: torch.Tensor | None) -> None:
    """No operand of a forward-only operation expects a gradient, which would be lost without a word.

    Args:
        trains: what to call instead, for the message.
    """
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise ValueError(
                f"{op}: {name} must not require a gradient, got requires_grad=True: there is no backward pass here, "
                f"{trains}; call it under torch.no_grad() where none is wanted"
            )


def require_distinct(op: str, name: str, t: torch.Tensor) -> None:
    """No two elements of ``t``, which a kernel writes, share memory."""
    reach = 0  # of the dimensions so far, from the smallest stride up
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size == 0:
            return
        if size > 1:
            if stride <= reach:
                raise ValueError(
                    f"{op}: {name} must have elements that do not overlap, got shape {tuple(t.shape)} with strides "
                    f"{t.stride()}"
                )
            reach += stride * (size - 1)


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    """First byte of ``t`` and one past its last."""
    first = t.data_ptr()
    return first, first + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * t.element_size()


def _columns_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices are different columns of one buffer."""
    if a.dim() != 2 or b.dim() != 2 or a.stride(1) != 1 or b.stride(1) != 1:
        return False
    row = a.stride(0) * a.element_size()
    if row != b.stride(0) * b.element_size() or row == 0:
        return False
    start = (b.data_ptr() - a.data_ptr()) % row
    return start >= a.shape[1] * a.element_size() and start + b.shape[1] * b.element_size() <= row


def refuse_overlap(op: str, out: torch.Tensor, **operands: torch.Tensor | None) -> None:
    """``out`` shares no memory with what other programs of the same launch still read."""
    if torch.compiler.is_compiling() or out.numel() == 0:
        return
    storage = out.untyped_storage().data_ptr()
    for name, t in operands.items():
        if t is None or t.numel() == 0 or t.untyped_storage().data_ptr() != storage:
            continue
        (first, last), (begin, end) = _bytes(out), _bytes(t)
        if first < end and begin < last and not _columns_apart(out, t):
            raise ValueError(f"{op}: out must not share memory with {name}, got {min(last, end) - max(first, begin)} B")
