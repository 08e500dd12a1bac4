"""Streams and events on the virtual GPU, where everything happens at once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_HostStream, _HostEvent = torch.Stream, torch.Event


def _is_host(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return False
    return torch.device(device).type == "cpu"


class _InOrder:
    """What a stream and an event have in common: there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def query(self) -> bool:
        """Everything has completed."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = _nothing


class Stream(_InOrder):
    """`torch.Stream`: of the card, unless the host's is asked for."""

    stream_id = device_index = cuda_stream = native_handle = priority = 0

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _HostStream("cpu") if _is_host(device) else super().__new__(cls)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        """There is one order: all streams are the same."""
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

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

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return (
            _HostEvent("cpu") if isinstance(device, (str, torch.device)) and _is_host(device) else super().__new__(cls)
        )

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events: no time passes on the virtual GPU."""
        return 0.0

    def ipc_handle(self) -> bytes:
        """One event has one handle."""
        return bytes(64)


class CudaStream(Stream):
    """`torch.cuda.Stream`."""


class CudaEvent(Event):
    """`torch.cuda.Event`."""


class ExternalStream(CudaStream):
    """`torch.cuda.ExternalStream`: a stream that another library made."""


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement): classes stay classes, each under the names that torch gives it."""
    yield torch, "Stream", Stream
    yield torch, "Event", Event
    for owner in (torch.cuda, torch.cuda.streams):
        for name, value in (("Stream", CudaStream), ("Event", CudaEvent), ("ExternalStream", ExternalStream)):
            if hasattr(owner, name):
                yield owner, name, value
