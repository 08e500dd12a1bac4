"""Streams on which a program works, and the waits between streams.

The current stream decides which stream's memory is allocated; a backward node runs on the stream of its forward
(`Engine::evaluate_function` of torch/csrc/autograd/engine.cpp). The nodes of parameters (AccumulateGrad) have no
sequence number that tells when they were made: they are assumed to run on the stream of the node before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict

from memprof.torch_private import autograd
from memprof.trace.events import Event, EventKind, StreamEvent, Trace, Use, Wait

_ACCUMULATE_GRAD_NUMBER = (1 << 64) - 1  # sequence number of an AccumulateGrad node

# (GPU, stream) -> event of the trace before which all work of the stream is known to be done.
Clock = dict[tuple[str, int], int]


class _NodeStreams:
    """Streams of a GPU on which autograd nodes were made: `streams[i]` from sequence number `numbers[i]` on."""

    __slots__ = ("numbers", "streams")

    def __init__(self) -> None:
        self.numbers = [0]
        self.streams = [0]

    def record_stream(self, stream: int) -> None:
        """Record that nodes are made on `stream` from now on."""
        if stream != self.streams[-1]:
            number = autograd.get_sequence_nr()
            if number == self.numbers[-1]:
                self.streams[-1] = stream
            else:
                self.numbers.append(number)
                self.streams.append(stream)

    def find_stream(self, number: int) -> int:
        """Return the stream on which the node with sequence number `number` was made."""
        return self.streams[bisect_right(self.numbers, number) - 1]


class _ThreadStreams(threading.local):
    """Current streams of a thread, and the streams on which the thread's autograd nodes were made."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self.running_node = -1
        self.selected_in_node: dict[str, int] = {}  # streams that the program selects in the running backward node
        self.node_streams: defaultdict[str, _NodeStreams] = defaultdict(_NodeStreams)


class Streams:
    """Current streams, waits and cross-stream uses of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.uses_other_streams = False  # whether the program has ever left the default stream
        self._closed = False
        self._thread = _ThreadStreams()
        self._clocks: defaultdict[tuple[str, int], Clock] = defaultdict(dict)  # work that each stream has waited for
        self._last_stream = 0  # The stream of the last allocation in the trace.
        # Storage -> stream, for storages allocated on a stream other than the default stream.
        self._stream_by_storage: dict[int, int] = {}
        self._recorded_uses: set[tuple[int, int]] = set()  # (storage, stream) recorded as used by a node.

    def get_current_stream(self, gpu: str) -> int:
        """Return the current stream of `gpu`; 0 is the default stream."""
        if not self.uses_other_streams:
            return 0
        here, node = self._thread, autograd.current_autograd_node()
        made = here.node_streams[gpu]
        if node is None:
            stream = here.current.get(gpu, 0)
        else:
            self._enter_node(node._sequence_nr())
            stream = here.selected_in_node.get(gpu, made.find_stream(here.running_node))
        made.record_stream(stream)
        return stream

    def find_node_stream(self, gpu: str) -> int | None:
        """Return the stream of `gpu` on which the engine runs the current backward node; None outside backward nodes,
        or if the node's own code has chosen another stream."""
        node = autograd.current_autograd_node()
        if node is None:
            return None
        self._enter_node(node._sequence_nr())
        here = self._thread
        return None if gpu in here.selected_in_node else here.node_streams[gpu].find_stream(here.running_node)

    def record_allocation_stream(self, index: int, gpu: str) -> None:
        """Append a change of stream if the next allocation, of storage `index`, is on another stream than the last."""
        stream = self.get_current_stream(gpu)
        if stream:
            self._stream_by_storage[index] = stream
        if stream != self._last_stream:
            self._last_stream = stream
            self._append_event(EventKind.STREAM, stream)

    def record_node_use(self, index: int) -> None:
        """Append that the running autograd node uses a storage, if the storage was made on another stream: the engine
        has made the node's stream wait (`InputBuffer::add` of autograd/input_buffer.cpp)."""
        gpu, made_on = self._trace.storages[index].device, self._stream_by_storage.get(index, 0)
        stream = None if gpu == "cpu" else self.find_node_stream(gpu)
        if stream is not None and stream != made_on and (index, stream) not in self._recorded_uses:
            self._recorded_uses.add((index, stream))
            self.record_use(index, stream)
            self.record_wait(self.get_clock(gpu, made_on), (gpu, stream))

    def select_stream(self, gpu: str, stream: int) -> None:
        """Make `stream` the current stream of `gpu`."""
        self.uses_other_streams = self.uses_other_streams or stream != 0
        here, node = self._thread, autograd.current_autograd_node()
        if node is None:
            here.current[gpu] = stream
        else:
            self._enter_node(node._sequence_nr())
            here.selected_in_node[gpu] = stream
        here.node_streams[gpu].record_stream(stream)

    def _enter_node(self, number: int) -> None:
        here = self._thread
        if number not in (here.running_node, _ACCUMULATE_GRAD_NUMBER):
            here.running_node = number
            here.selected_in_node = {}

    def record_use(self, storage: int, stream: int) -> None:
        """Append that `stream` uses a storage of another stream (Tensor.record_stream)."""
        if not self._closed:
            self._append_event(EventKind.USE, len(self._trace.uses))
            self._trace.uses.append(Use(storage, stream))

    def get_clock(self, gpu: str, stream: int) -> Clock:
        """Return the clock at which the work given to `stream` until now is done. The clock is empty before the trace's
        first `use`: until then no free waits for a stream."""
        if not self._trace.uses:
            return {}
        return {**self._clocks[gpu, stream], (gpu, stream): len(self._trace.events)}

    def record_wait(self, done: Clock, waiter: tuple[str, int] | None) -> None:
        """Append that a stream of a GPU, or the host (None), waits for the work `done`."""
        if not done or self._closed:
            return
        self._append_event(EventKind.WAIT, len(self._trace.waits))
        self._trace.waits.append(
            Wait(waiter is None, tuple(StreamEvent(*stream, time) for stream, time in done.items()))
        )
        if waiter is not None:
            known = self._clocks[waiter]
            for stream, time in done.items():
                known[stream] = max(time, known.get(stream, 0))

    def record_host_wait(self, gpu: str) -> None:
        """Make the host wait for the current stream of `gpu`, as reading a value or copying does."""
        if self._trace.uses:
            self.record_wait(self.get_clock(gpu, self.get_current_stream(gpu)), None)

    def record_host_wait_for_all(self, gpu: str) -> None:
        """Make the host wait for all streams of `gpu`."""
        streams = sorted({use.stream for use in self._trace.uses})
        self.record_wait({(gpu, stream): len(self._trace.events) for stream in streams}, None)

    def close(self) -> None:
        """Record nothing from now on."""
        self._closed = True

    def _append_event(self, kind: EventKind, ref: int) -> None:
        self._trace.events.append(Event(kind, ref))
