"""Streams, events and what else of torch.cuda programs take for classes."""

import pytest
import torch

import memprof


@pytest.fixture(autouse=True)
def card():
    with memprof.virtual_gpu("h100-80gb"):
        yield


@pytest.mark.parametrize("stream", ["torch.Stream()", "torch.Stream('cuda')", "torch.cuda.Stream()"])
def test_streams_of_every_kind(stream):
    made = eval(stream, {"torch": torch})
    assert isinstance(made, torch.Stream) and made.device.type == "cuda"
    with made:
        made.wait_stream(torch.cuda.current_stream())
        event = made.record_event()
        event.wait()
    assert isinstance(event, torch.cuda.Event) and isinstance(event, torch.Event) and event.query()


def test_the_current_stream_is_a_stream():
    for current in (torch.cuda.current_stream, torch.accelerator.current_stream, torch.cuda.default_stream):
        assert isinstance(current(), torch.cuda.Stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not isinstance(torch.cuda.Event(), torch.Stream)


def test_streams_of_the_host_stay_so():
    assert torch.Stream("cpu").device.type == "cpu"


def test_events_take_no_time():
    first, second = torch.Event("cuda"), torch.Event(enable_timing=True)
    first.record()
    second.record()
    assert first.elapsed_time(second) == 1.0


@pytest.mark.parametrize("name", ["MemPool", "Stream", "Event", "CUDAGraph", "ExternalStream", "graph", "device",
                                  "StreamContext", "BoolTensor", "FloatTensor"])  # fmt: skip
def test_classes_stay_classes(name):
    kind = getattr(torch.cuda, name)
    assert isinstance(kind, type)
    assert (kind | None) is not None
    assert not isinstance(3, kind)


def test_what_is_asked_before_bfloat16_is_taken():
    assert torch.cuda.nccl.version() >= (2, 27)
    assert torch.version.cuda is not None and torch.backends.cuda.is_built()


MIB = 1 << 20


def taken(num_bytes):
    """Memory that is taken and given back: it stays reserved for the stream that it was taken on."""
    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_reserved()


def test_each_stream_has_memory_of_its_own():
    side = torch.cuda.Stream()
    assert taken(20 * MIB) == 20 * MIB == taken(20 * MIB)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        assert taken(20 * MIB) == 40 * MIB == taken(20 * MIB)
        with torch.cuda.stream(torch.cuda.default_stream()):
            assert taken(20 * MIB) == 40 * MIB
        assert torch.accelerator.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert taken(40 * MIB) == 80 * MIB
    torch.cuda.set_stream(side)
    assert taken(40 * MIB) == 120 * MIB
    with torch.cuda.stream(None), torch.cuda.ExternalStream(1 << 40):
        assert taken(40 * MIB) == 160 * MIB
    assert torch.cuda.current_stream() == side


def test_new_streams_come_from_a_pool():
    """32 for each of four priorities, in turn (c10/cuda/CUDAStream.cpp)."""
    for priority in (0, -1, -3):
        made = [torch.cuda.Stream(priority=priority) for _ in range(33)]
        assert len(set(made)) == 32 and made[0] == made[32]
    assert (torch.cuda.Stream(priority=-9).priority, torch.cuda.Stream(priority=7).priority) == (-3, 0)
    assert len({torch.cuda.Stream(priority=priority) for priority in (0, -1, -2, -3, 0)}) == 5


def test_a_workspace_of_cublas_for_each_stream():
    x = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    x @ x
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x
    assert torch.cuda.memory_allocated() == before + 2 * 32 * MIB
