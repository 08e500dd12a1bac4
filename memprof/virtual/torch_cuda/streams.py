"""Streams and events on the virtual GPU, where everything happens at once and in order.

A stream matters all the same: it has memory of its own in torch's caching allocator.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

_HostStream, _HostEvent = torch.Stream, torch.Event
_POOL = 32
"""Streams of one priority."""
_PRIORITIES = 4
_MADE: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
"""Of each card and priority, how many were made."""


def _is_host(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return False
    return torch.device(device).type == "cpu"


class _InOrder:
    """What a stream and an event have in common: there is nothing to wait for."""

    def __init__(self, device: Any = None) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def query(self) -> bool:
        """Everything has completed."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = _nothing


class Stream(_InOrder):
    """`torch.Stream`: of the card, unless the host's is asked for.

    A new one is the next of a pool of its priority, in turn (c10/cuda/CUDAStream.cpp).
    """

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _HostStream("cpu") if _is_host(device) else super().__new__(cls)

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **rest: Any) -> None:
        super().__init__(device)
        self.device_index = self.device.index
        self.priority = min(max(priority, 1 - _PRIORITIES), 0)
        if stream_id is None:
            stream_id = 1 - self.priority * _POOL + next(_MADE[self.device_index, self.priority]) % _POOL
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
        """Two of a pool are the same once it has been gone through."""
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one."""
        return CudaEvent() if event is None else event

    wait_stream = wait_event = _InOrder._nothing


class Event(_InOrder):
    """`torch.Event`: of the card, unless the host's is asked for."""

    event_id = cuda_event = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return (
            _HostEvent("cpu") if isinstance(device, (str, torch.device)) and _is_host(device) else super().__new__(cls)
        )

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events: one, as any number that is not known, so that rates can be computed."""
        return 1.0

    def ipc_handle(self) -> bytes:
        """One event has one handle."""
        return bytes(64)


class CudaStream(Stream):
    """`torch.cuda.Stream`."""


class CudaEvent(Event):
    """`torch.cuda.Event`."""


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`: a stream that another library made."""

    def __init__(self, stream_ptr: int, device: Any = None, **rest: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement): classes stay classes, each under the names that torch gives it."""
    _MADE.clear()
    yield torch, "Stream", Stream
    yield torch, "Event", Event
    for owner in (torch.cuda, torch.cuda.streams):
        for name, value in (("Stream", CudaStream), ("Event", CudaEvent), ("ExternalStream", ExternalStream)):
            if hasattr(owner, name):
                yield owner, name, value
