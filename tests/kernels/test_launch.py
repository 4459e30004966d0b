"""What launches of several kernels share: counters of programs that have arrived."""

import pytest
import torch

from beam_moe.kernels.launch import ARRIVAL_COUNTERS, ArrivalCounters

CUDA = torch.cuda.is_available()


def test_a_stream_keeps_its_counters(device):
    counters = ArrivalCounters()
    first = counters.get(torch.device(device))
    assert first.shape == (ARRIVAL_COUNTERS,) and first.dtype == torch.int32 and not first.any()
    assert counters.get(torch.device(device)) is first


@pytest.mark.gpu
def test_streams_have_counters_of_their_own_also_when_first_met_in_a_capture():
    counters, device = ArrivalCounters(), torch.device("cuda", torch.cuda.current_device())
    sets, graph = [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert counters.get(device) is None, "memory cannot be zeroed once and for all in a capture"
    sets.append(counters.get(device))
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        sets.append(counters.get(device))
    for _ in range(2 * ArrivalCounters.SPARE):
        with torch.cuda.stream(torch.cuda.Stream()):
            sets.append(counters.get(device))
    assert all(s is not None and not s.any() for s in sets)
    assert len({s.data_ptr() for s in sets}) >= 3, "a set for each stream that torch hands out"
