"""silu(gate) * up: one rounding, strided rows, odd widths, refusals."""

import pytest
import torch

from beam_moe.kernels.silu_mul import silu_mul
from beam_moe.testing import assert_close


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float16, 3e-4)])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (5, 1030)])
def test_against_torch(device, dtype, limit, rows, width):
    wide = torch.randn(rows, 2 * width + 5, device=device).to(dtype)
    x = wide[:, : 2 * width]
    out = torch.full((rows, width + 3), 7.0, dtype=dtype, device=device)
    got = silu_mul(x, out[:, :width])
    gate, up = x.float().chunk(2, 1)
    assert_close("silu_mul", torch.nn.functional.silu(gate) * up, got, limit)
    assert bool((out[:, width:] == 7).all())


def test_rounds_once(device):
    """A product of rounded factors lies elsewhere for some of these values."""
    x = torch.randn(64, 256, device=device).half()
    gate, up = x.float().chunk(2, 1)
    once = (torch.nn.functional.silu(gate) * up).half()
    twice = torch.nn.functional.silu(gate).half() * up.half()
    got = silu_mul(x)
    assert (got != once).float().mean() < 0.01 < (twice != once).float().mean()


def test_no_rows_and_refusals(device):
    assert silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)
    for bad, message in (
        (torch.zeros(2, 3), "gate_up must be"),
        (torch.zeros(2, 4, dtype=torch.int32), "gate_up must be bfloat16"),
        (torch.zeros(4, 2).t().contiguous().t(), "innermost stride"),
    ):
        with pytest.raises(ValueError, match=message):
            silu_mul(bad.to(device))
    with pytest.raises(ValueError, match="out must be"):
        silu_mul(torch.zeros(2, 4, device=device), torch.zeros(2, 3, device=device))
