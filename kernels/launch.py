"""What every launch asks of the device."""

import functools

import torch

from beam_moe import env


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether launches on ``device`` may start before the one before them is through (sm_90 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and env.flag("PDL")
