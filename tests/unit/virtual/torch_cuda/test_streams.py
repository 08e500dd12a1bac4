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
    assert first.elapsed_time(second) == 0.0


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
