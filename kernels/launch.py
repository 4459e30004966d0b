"""What every launch asks of the device."""

import functools

import torch

from beam_moe import env

ARRIVAL_COUNTERS = 256  # of one set


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether launches on ``device`` may start before the one before them is through (sm_90 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and env.flag("PDL")


def shared_memory(device: torch.device | int | None) -> int:
    """Bytes of shared memory that a program may have on a GPU: 227 KiB on sm_90, 99 KiB on sm_120 and sm_89."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # absent from stubs


class ArrivalCounters:
    """For launches whose programs count their arrivals, so that the last of a group finishes the group's work.

    A set is int32 ``(ARRIVAL_COUNTERS,)``, zeroed once and left zero by every launch; each stream has its own. Graphs
    captured on one stream share a set with each other and with that stream's calls: like everything that shares a
    workspace, run them one after another. A capture cannot zero memory once and for all, so sets for streams first met
    in a capture are made in advance. Nothing else writes them. Programs of `linear_lora` wait for theirs: two of its
    launches that ran on one set at once might hang or read what is not there yet.
    """

    SPARE = 8

    def __init__(self):
        self.sets: dict[tuple, torch.Tensor] = {}
        self.spare: dict[torch.device, list[torch.Tensor]] = {}

    def get(self, device: torch.device) -> torch.Tensor | None:
        """This stream's set; None in a capture on a new stream for which no set made in advance is left."""
        cuda = device.type == "cuda"
        key = (device, torch.cuda.current_stream(device).cuda_stream if cuda else 0)
        if key in self.sets:
            return self.sets[key]
        spare = self.spare.setdefault(device, [])
        if cuda and torch.cuda.is_current_stream_capturing():
            if not spare:
                return None
        elif len(spare) < 2:
            spare.extend(torch.zeros((self.SPARE, ARRIVAL_COUNTERS), dtype=torch.int32, device=device).unbind())
            if cuda:
                torch.cuda.current_stream(device).synchronize()  # once a process: other streams will use these too
        self.sets[key] = spare.pop()
        return self.sets[key]
