"""Streams and events on the virtual GPU, where all work finishes immediately and in order.

Streams still matter for memory: each has its own blocks in torch's caching allocator, and a block that another stream
uses can be reused only when that stream's work is done, which is assumed once the program has waited for it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from memprof.trace.events import Trace
from memprof.watch.streams import Clock, Streams

_POOL = 32  # streams of one priority
_PRIORITIES = 4
# (GPU index, priority) -> counter of the streams made.
_COUNTERS: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
_log = Streams(Trace())  # record of the waits of the current run


class _FinishedWork:
    """The base of streams and events, whose work is always finished."""

    _host_kind: Any  # torch's own class

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_host = isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
        return cls._host_kind("cpu") if is_host else super().__new__(cls)

    def __init__(self, device: Any = None) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def _clock_of_work(self) -> Clock:
        """Return the clock of the work that a wait on this object waits for."""
        raise NotImplementedError

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _log.record_wait(self._clock_of_work(), None)

    def wait(self, stream: Any = None) -> None:
        waiter = torch.cuda.current_stream(self.device) if stream is None else stream
        _log.record_wait(self._clock_of_work(), _key(waiter))


class TorchStream(_FinishedWork):
    """`torch.Stream`, on the GPU unless the host's stream is requested.

    A new stream is the next of the pool of its priority, in turn (c10/cuda/CUDAStream.cpp).
    """

    _host_kind: Any = torch.Stream

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **rest: Any) -> None:
        super().__init__(device)
        self.device_index = self.device.index
        self.priority = min(max(priority, 1 - _PRIORITIES), 0)
        if stream_id is None:
            stream_id = 1 - self.priority * _POOL + next(_COUNTERS[self.device_index, self.priority]) % _POOL
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._outer: list[Any] = []

    def __enter__(self) -> Any:
        self._outer.append((torch.cuda.current_stream(self.device), torch.cuda.current_stream()))
        this: Any = self
        torch.cuda.set_stream(this)
        return this

    def __exit__(self, *exc: object) -> None:
        for outer in self._outer.pop():
            torch.cuda.set_stream(outer)

    def __eq__(self, other: object) -> bool:
        """Return whether two streams are the same stream of a pool, which is reused in turn."""
        return isinstance(other, TorchStream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def is_capturing(self) -> bool:
        """Return False: no graph is being captured."""
        return False

    def _clock_of_work(self) -> Clock:
        return _log.get_clock(*_key(self))

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new event, on this stream; return the event."""
        event = CudaEvent() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        """Make this stream wait for the work submitted to `stream`."""
        stream.wait(self)

    wait_event = wait_stream


class TorchEvent(_FinishedWork):
    """`torch.Event`, on the GPU unless the host's event is requested."""

    _host_kind: Any = torch.Event
    event_id = cuda_event = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._recorded: Clock = {}

    def _clock_of_work(self) -> Clock:
        return self._recorded

    def record(self, stream: Any = None) -> None:
        """Record the event after the work submitted so far to `stream`, by default the current stream."""
        behind: Any = torch.cuda.current_stream() if stream is None else stream
        self._recorded = behind._clock_of_work()

    def elapsed_time(self, other: Any) -> float:
        """Return 1.0 as the milliseconds between two events: an unknown time from which programs compute rates."""
        return 1.0

    def ipc_handle(self) -> bytes:
        """Return an event handle of 64 zero bytes."""
        return bytes(64)


class CudaStream(TorchStream):
    """`torch.cuda.Stream`."""


class CudaEvent(TorchEvent):
    """`torch.cuda.Event`."""


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`, a stream that another library made."""

    def __init__(self, stream_ptr: int, device: Any = None, **rest: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


def _key(stream: Any) -> tuple[str, int]:
    return str(stream.device), stream.stream_id


def patches(log: Streams) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of the stream and event classes, under all their names."""
    global _log
    _log = log
    _COUNTERS.clear()
    yield torch, "Stream", TorchStream
    yield torch, "Event", TorchEvent
    for owner in (torch.cuda, torch.cuda.streams):
        for name, value in (("Stream", CudaStream), ("Event", CudaEvent), ("ExternalStream", ExternalStream)):
            if hasattr(owner, name):
                yield owner, name, value
