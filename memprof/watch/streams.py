"""On which streams a program works, and who waits for whom.

The current stream decides whose memory is taken; a backward node runs on the stream that its forward ran on
(`Engine::evaluate_function` of torch/csrc/autograd/engine.cpp). The nodes of parameters (AccumulateGrad) have no number
by which to tell when they were made: they are taken to run on the stream of the node before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict

from memprof.torch_private import autograd
from memprof.trace.events import Event, EventKind, StreamEvent, Trace, Use, Wait

_NO_NUMBER = (1 << 64) - 1  # of an AccumulateGrad

# What is known to be done: of a GPU's stream, all from before an event of the trace.
Clock = dict[tuple[str, int], int]


class _Made:
    """On which stream of a GPU autograd nodes were made: from the number on that stands in `numbers`."""

    __slots__ = ("numbers", "streams")

    def __init__(self) -> None:
        self.numbers = [0]
        self.streams = [0]

    def note(self, stream: int) -> None:
        """Note that nodes are made on `stream` from here on."""
        if stream != self.streams[-1]:
            number = autograd.get_sequence_nr()
            if number == self.numbers[-1]:
                self.streams[-1] = stream
            else:
                self.numbers.append(number)
                self.streams.append(stream)

    def of(self, number: int) -> int:
        """Return the stream of a node."""
        return self.streams[bisect_right(self.numbers, number) - 1]


class _ThreadStreams(threading.local):
    """Keeps which streams of a thread are current, and on which its autograd nodes were made."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self.node = -1
        self.in_node: dict[str, int] = {}  # set by the program while a backward node runs, and until it ends
        self.made: defaultdict[str, _Made] = defaultdict(_Made)


class Streams:
    """Keeps track of them for one trace; a program that stays on the default stream is never requested anything."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.several = False  # whether the program has ever left the default stream
        self._closed = False
        self._thread = _ThreadStreams()
        self._clocks: defaultdict[tuple[str, int], Clock] = defaultdict(dict)  # what each stream has waited for
        self._of_trace = 0  # The stream of the last allocation in the trace.
        # Storage -> its stream, of those that were taken on another than the default one.
        self._of_storage: dict[int, int] = {}
        self._lent: set[tuple[int, int]] = set()  # Storages and streams that the autograd engine has lent them to.

    def current(self, gpu: str) -> int:
        """Return the stream of `gpu` that is current now; 0 is the default one."""
        if not self.several:
            return 0
        here, node = self._thread, autograd.current_autograd_node()
        made = here.made[gpu]
        if node is None:
            stream = here.current.get(gpu, 0)
        else:
            self._enter(node._sequence_nr())
            stream = here.in_node.get(gpu, made.of(here.node))
        made.note(stream)
        return stream

    def of_node(self, gpu: str) -> int | None:
        """Return the stream of `gpu` that the engine runs a backward node on; None where there is none, or its own
        code has chosen another."""
        node = autograd.current_autograd_node()
        if node is None:
            return None
        self._enter(node._sequence_nr())
        here = self._thread
        return None if gpu in here.in_node else here.made[gpu].of(here.node)

    def note_allocation(self, index: int, gpu: str) -> None:
        """Append the change of stream, if storage `index`, whose allocation comes next, is taken on another than the
        last: on the current one of `gpu`."""
        stream = self.current(gpu)
        if stream:
            self._of_storage[index] = stream
        if stream != self._of_trace:
            self._of_trace = stream
            self._append(EventKind.STREAM, stream)

    def lend_to_node(self, index: int) -> None:
        """Append that the autograd node which is running works on a storage, if its stream is not that on which the
        storage was made: the engine has lent it and made the node's stream wait (`InputBuffer::add` of
        autograd/input_buffer.cpp)."""
        gpu, made_on = self._trace.storages[index].device, self._of_storage.get(index, 0)
        stream = None if gpu == "cpu" else self.of_node(gpu)
        if stream is not None and stream != made_on and (index, stream) not in self._lent:
            self._lent.add((index, stream))
            self.use(index, stream)
            self.wait(self.now(gpu, made_on), (gpu, stream))

    def select(self, gpu: str, stream: int) -> None:
        """Make `stream` the current one of `gpu`."""
        self.several = self.several or stream != 0
        here, node = self._thread, autograd.current_autograd_node()
        if node is None:
            here.current[gpu] = stream
        else:
            self._enter(node._sequence_nr())
            here.in_node[gpu] = stream
        here.made[gpu].note(stream)

    def _enter(self, number: int) -> None:
        here = self._thread
        if number not in (here.node, _NO_NUMBER):
            here.node = number
            here.in_node = {}

    def use(self, storage: int, stream: int) -> None:
        """Append that `stream` works on a storage of another (Tensor.record_stream)."""
        if not self._closed:
            self._append(EventKind.USE, len(self._trace.uses))
            self._trace.uses.append(Use(storage, stream))

    def now(self, gpu: str, stream: int) -> Clock:
        """Return what is done once all that `stream` was given until now is. Nothing that was freed before the first
        `use` waits for a stream: until then, nothing need be known."""
        if not self._trace.uses:
            return {}
        return {**self._clocks[gpu, stream], (gpu, stream): len(self._trace.events)}

    def wait(self, done: Clock, waiter: tuple[str, int] | None) -> None:
        """Append that a stream of a GPU, or the host (None), has been made to wait."""
        if not done or self._closed:
            return
        self._append(EventKind.WAIT, len(self._trace.waits))
        self._trace.waits.append(
            Wait(waiter is None, tuple(StreamEvent(*stream, time) for stream, time in done.items()))
        )
        if waiter is not None:
            known = self._clocks[waiter]
            for stream, time in done.items():
                known[stream] = max(time, known.get(stream, 0))

    def wait_for_current(self, gpu: str) -> None:
        """Let the host wait for the current stream of `gpu`, as a read of a value or a copy makes it."""
        if self._trace.uses:
            self.wait(self.now(gpu, self.current(gpu)), None)

    def wait_for_all(self, gpu: str) -> None:
        """Let the host wait for all of `gpu`."""
        streams = sorted({use.stream for use in self._trace.uses})
        self.wait({(gpu, stream): len(self._trace.events) for stream in streams}, None)

    def close(self) -> None:
        """Note nothing from now on."""
        self._closed = True

    def _append(self, kind: EventKind, ref: int) -> None:
        self._trace.events.append(Event(kind, ref))
