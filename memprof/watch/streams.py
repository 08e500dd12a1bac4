"""CUDA streams of a program: the current stream of each thread, waits between streams, and cross-stream uses.

Memory is allocated on the current stream. A backward node runs on the stream of its forward operator
(`Engine::evaluate_function` of torch/csrc/autograd/engine.cpp). AccumulateGrad nodes have no usable sequence number:
they are assumed to run on the stream of the node before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict

from memprof.torch_private import autograd
from memprof.trace.events import Event, EventKind, StreamEvent, Trace, Use, Wait

_ACCUMULATE_GRAD_NUMBER = (1 << 64) - 1  # sequence number of an AccumulateGrad node

# (GPU, stream) -> event index in the trace: work that was given to the stream before this event has completed.
Clock = dict[tuple[str, int], int]


class _NodeStreams:
    """Streams of a GPU on which autograd nodes are created: `streams[i]` from sequence number `numbers[i]` on."""

    __slots__ = ("numbers", "streams")

    def __init__(self) -> None:
        self.numbers = [0]
        self.streams = [0]

    def record_stream(self, stream: int) -> None:
        """Record that autograd nodes are created on `stream` from now on."""
        if stream != self.streams[-1]:
            number = autograd.get_sequence_nr()
            if number == self.numbers[-1]:
                self.streams[-1] = stream
            else:
                self.numbers.append(number)
                self.streams.append(stream)

    def find_stream(self, number: int) -> int:
        """Return the stream on which the autograd node with sequence number `number` was created."""
        return self.streams[bisect_right(self.numbers, number) - 1]


class _ThreadStreams(threading.local):
    """Current stream of each GPU in a thread, and the streams on which the thread's autograd nodes were created."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self.running_node = -1
        self.selected_in_node: dict[str, int] = {}  # streams that the program selects in the running backward node
        self.node_streams: defaultdict[str, _NodeStreams] = defaultdict(_NodeStreams)


class Streams:
    """Recorder of the streams of one trace: current streams, waits between streams, cross-stream uses of storages."""

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
        thread, node = self._thread, autograd.current_autograd_node()
        node_streams = thread.node_streams[gpu]
        if node is None:
            stream = thread.current.get(gpu, 0)
        else:
            self._enter_node(node._sequence_nr())
            stream = thread.selected_in_node.get(gpu, node_streams.find_stream(thread.running_node))
        node_streams.record_stream(stream)
        return stream

    def find_node_stream(self, gpu: str) -> int | None:
        """Return the stream of `gpu` on which the autograd engine runs the current backward node; None outside backward
        nodes, or if code of the node has selected a stream."""
        node = autograd.current_autograd_node()
        if node is None:
            return None
        self._enter_node(node._sequence_nr())
        thread = self._thread
        return None if gpu in thread.selected_in_node else thread.node_streams[gpu].find_stream(thread.running_node)

    def record_allocation_stream(self, index: int, gpu: str) -> None:
        """Append a STREAM event if storage `index`, about to be allocated, is on another stream than the one before."""
        stream = self.get_current_stream(gpu)
        if stream:
            self._stream_by_storage[index] = stream
        if stream != self._last_stream:
            self._last_stream = stream
            self._append_event(EventKind.STREAM, stream)

    def record_node_use(self, index: int) -> None:
        """Record that the running autograd node uses storage `index`. If the storage is from another stream, append the
        use, and the wait that the engine inserts (`InputBuffer::add` of autograd/input_buffer.cpp)."""
        gpu, origin_stream = self._trace.storages[index].device, self._stream_by_storage.get(index, 0)
        stream = None if gpu == "cpu" else self.find_node_stream(gpu)
        if stream is not None and stream != origin_stream and (index, stream) not in self._recorded_uses:
            self._recorded_uses.add((index, stream))
            self.record_use(index, stream)
            self.record_wait(self.get_clock(gpu, origin_stream), (gpu, stream))

    def select_stream(self, gpu: str, stream: int) -> None:
        """Make `stream` the current stream of `gpu` in this thread, or in the running backward node."""
        self.uses_other_streams = self.uses_other_streams or stream != 0
        thread, node = self._thread, autograd.current_autograd_node()
        if node is None:
            thread.current[gpu] = stream
        else:
            self._enter_node(node._sequence_nr())
            thread.selected_in_node[gpu] = stream
        thread.node_streams[gpu].record_stream(stream)

    def _enter_node(self, number: int) -> None:
        thread = self._thread
        if number not in (thread.running_node, _ACCUMULATE_GRAD_NUMBER):
            thread.running_node = number
            thread.selected_in_node = {}

    def record_use(self, storage: int, stream: int) -> None:
        """Append that `stream` uses a `storage` allocated on another stream (Tensor.record_stream)."""
        if not self._closed:
            self._append_event(EventKind.USE, len(self._trace.uses))
            self._trace.uses.append(Use(storage, stream))

    def get_clock(self, gpu: str, stream: int) -> Clock:
        """Return the clock that is reached once all work given to `stream` so far has completed. Empty before the
        trace's first cross-stream use, since no free waits for a stream until then."""
        if not self._trace.uses:
            return {}
        return {**self._clocks[gpu, stream], (gpu, stream): len(self._trace.events)}

    def record_wait(self, clock: Clock, waiter: tuple[str, int] | None) -> None:
        """Append that `waiter`, a (GPU, stream) or None for the host, waits until `clock` is reached."""
        if not clock or self._closed:
            return
        self._append_event(EventKind.WAIT, len(self._trace.waits))
        self._trace.waits.append(
            Wait(waiter is None, tuple(StreamEvent(*stream, time) for stream, time in clock.items()))
        )
        if waiter is not None:
            waiter_clock = self._clocks[waiter]
            for stream, time in clock.items():
                waiter_clock[stream] = max(time, waiter_clock.get(stream, 0))

    def record_host_wait(self, gpu: str) -> None:
        """Append that the host waits for the current stream of `gpu`, as reading a value or copying does."""
        if self._trace.uses:
            self.record_wait(self.get_clock(gpu, self.get_current_stream(gpu)), None)

    def record_host_wait_for_all(self, gpu: str) -> None:
        """Append that the host waits for all streams of `gpu`."""
        streams = sorted({use.stream for use in self._trace.uses})
        self.record_wait({(gpu, stream): len(self._trace.events) for stream in streams}, None)

    def close(self) -> None:
        """Record nothing from now on."""
        self._closed = True

    def _append_event(self, kind: EventKind, ref: int) -> None:
        self._trace.events.append(Event(kind, ref))
