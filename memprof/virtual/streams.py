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

_POOL_SIZE = 32  # streams of one priority
_NUM_PRIORITIES = 4
# (GPU index, priority) -> counter of the streams made.
_COUNTERS: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
_stream_record = Streams(Trace())  # record of the waits of the current run
_functions: Any = (
    None  # `GpuFunctions` (gpu_functions.py): the current run's functions of the current device and stream
)


class _FinishedWork:
    """Base class of streams and events, whose work is always finished."""

    _host_class: Any  # torch's own class

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_host = isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
        return cls._host_class("cpu") if is_host else super().__new__(cls)

    def __init__(self, device: Any = None) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.device = torch.device(_functions.gpus.get_name(_functions.current_device() if index is None else index))

    def _get_work_clock(self) -> Clock:
        """Return, for each stream, the time of the last operation that a wait on this object has to await."""
        raise NotImplementedError

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _stream_record.record_wait(self._get_work_clock(), None)

    def wait(self, stream: Any = None) -> None:
        waiting_stream = _functions.current_stream(self.device) if stream is None else stream
        _stream_record.record_wait(self._get_work_clock(), _get_stream_key(waiting_stream))


class TorchStream(_FinishedWork):
    """A replacement of `torch.Stream`; for the device "cpu", torch's own stream is created.

    Streams of one priority come from a pool of 32, in turn (c10/cuda/CUDAStream.cpp).
    """

    _host_class: Any = torch.Stream

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **rest: Any) -> None:
        super().__init__(device)
        self.device_index = self.device.index
        self.priority = min(max(priority, 1 - _NUM_PRIORITIES), 0)
        if stream_id is None:
            stream_id = 1 - self.priority * _POOL_SIZE + next(_COUNTERS[self.device_index, self.priority]) % _POOL_SIZE
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._outer_streams: list[Any] = []

    def __enter__(self) -> Any:
        self._outer_streams.append((_functions.current_stream(self.device), _functions.current_stream()))
        this: Any = self
        _functions.set_stream(this)
        return this

    def __exit__(self, *exc: object) -> None:
        for stream in self._outer_streams.pop():
            _functions.set_stream(stream)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the same stream of the same pool."""
        return isinstance(other, TorchStream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def is_capturing(self) -> bool:
        """Return False: no graph is being captured."""
        return False

    def _get_work_clock(self) -> Clock:
        return _stream_record.get_clock(*_get_stream_key(self))

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new event, on this stream; return the event."""
        event = GpuEvent() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        """Make this stream wait for the work submitted to `stream`."""
        stream.wait(self)

    wait_event = wait_stream


class TorchEvent(_FinishedWork):
    """A replacement of `torch.Event`; for the device "cpu", torch's own event is created."""

    _host_class: Any = torch.Event
    event_id = cuda_event = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._recorded_clock: Clock = {}

    def _get_work_clock(self) -> Clock:
        return self._recorded_clock

    def record(self, stream: Any = None) -> None:
        """Record the event after the work submitted so far to `stream`, by default the current stream."""
        source_stream: Any = _functions.current_stream() if stream is None else stream
        self._recorded_clock = source_stream._get_work_clock()

    def elapsed_time(self, other: Any) -> float:
        """Return 1.0 (milliseconds): the time is unknown, and programs divide by it."""
        return 1.0

    def ipc_handle(self) -> bytes:
        """Return an event handle of 64 zero bytes."""
        return bytes(64)


class GpuStream(TorchStream):
    """A replacement of `torch.cuda.Stream`."""


class GpuEvent(TorchEvent):
    """A replacement of `torch.cuda.Event`."""


class ExternalStream(GpuStream):
    """A replacement of `torch.cuda.ExternalStream`, a stream that another library created."""

    def __init__(self, stream_ptr: int, device: Any = None, **rest: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


def _get_stream_key(stream: Any) -> tuple[str, int]:
    return str(stream.device), stream.stream_id


def patches(stream_record: Streams, functions: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches (owner, name, replacement) of the stream and event classes; `stream_record` records the waits."""
    global _stream_record, _functions
    _stream_record, _functions = stream_record, functions
    _COUNTERS.clear()
    yield torch, "Stream", TorchStream
    yield torch, "Event", TorchEvent
    classes = {"Stream": GpuStream, "Event": GpuEvent, "ExternalStream": ExternalStream}
    module: Any = getattr(torch, functions.gpus.type)
    for owner in (module, getattr(module, "streams", module)):
        for name, value in classes.items():
            if hasattr(owner, name):
                yield owner, name, value
