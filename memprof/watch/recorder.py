"""The recorder: turns births and deaths of storages into a Trace.

It knows nothing of how a run is made. The virtual GPU tells it of every new storage; it watches the storage's Python
object, which torch keeps alive exactly as long as the storage, so that a free is seen where it really happens: when the
last reference dies, be it Python's, autograd's or a container's.
"""

from __future__ import annotations

import bisect
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions

from memprof.trace.events import (
    NONE,
    Event,
    EventKind,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Storage,
    Trace,
)
from memprof.watch.forward import Forward, Place
from memprof.watch.modules import ModuleTracker
from memprof.watch.sharding import communication
from memprof.watch.streams import Streams
from memprof.watch.wrappers import parts_of_sparse, unwrapped

_TORCH_DIR = str(torch.__path__[0])
_DEPRECATIONS = typing_extensions.__file__
"""What torch wraps functions in that have another name now."""
_PYTHON_DIR = sysconfig.get_path("stdlib")
_MEMPROF_DIR = __file__.rsplit("/watch/", 1)[0]
_OWN_WORKLOADS = _MEMPROF_DIR + "/workload/"
_MAY_CHANGE = (Role.INPUT, Role.COMMUNICATION)
GENERATED: list[str] = []
"""Where files lie that a compiler writes, while there are any."""
_COPIES = ("aten._to_copy", "aten.cat")
_new: Any = tuple.__new__
"""Makes a named tuple without the Python function that its class has for that."""
_ALLOC, _FREE = EventKind.ALLOC, EventKind.FREE
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_current_graph_task = torch._C._current_graph_task_id


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that remembers which one it was."""

    __slots__ = ("address", "index")

    address: int
    index: int


class Recorder:
    """Collects one Trace; several threads may tell it of storages."""

    def __init__(self, modules: ModuleTracker) -> None:
        self.trace = Trace(modules=modules.table)
        self.modules = modules
        modules.listener = self._module_event
        self.live: dict[int, int] = {}
        """Address of a living storage object -> its index in the trace."""
        self.on_death: Callable[[int], None] = lambda address: None
        self.refusal: Callable[[str], str | None] | None = None
        """Asked after each request for memory on a card, by its device: what torch.OutOfMemoryError is to say, or
        None."""
        self.streams = Streams(self.trace)
        self._stream_of_trace = 0
        self._on_stream: dict[int, int] = {}
        """Of storages that were taken on another stream than the default one."""
        self._lent: set[tuple[int, int]] = set()
        """Storages and streams that the autograd engine has lent them to."""
        self._pool, self._pool_of_trace, self._pool_of_thread = 0, 0, False
        """The private pool that memory is taken from, and that of the last event; whether backward passes take none."""
        self.communicates = False
        """Whether the program has joined a group of processes: then what torch takes for it is told apart."""
        self.counts_hidden = True
        """Whether memory that no tensor shows is recorded."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self._refs: dict[int, _StorageRef] = {}
        self._gone: set[int] = set()
        """Storages that live on, of processes that have ended."""
        self._op_index: dict[str, int] = {}
        self._line_index: dict[str, int] = {}
        self._source_index: dict[tuple[CodeType, int], int] = {}
        self._source_at: dict[tuple[int, int], int] = {}
        """The same by the `id` of the code and the place in it: a code's hash goes through all that it holds."""
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        """By `id`, and whether it is the program's."""
        self._forward = Forward()
        self.lock = threading.RLock()
        """Held while anything is written into the trace."""
        self.threads = False
        """Whether several threads run operators; each then holds the lock for the length of one."""
        self._aside = NONE
        """The phase of those that stand aside."""
        self._phase = NONE
        self._closed = False
        self.begin_phase(PhaseKind.OTHER, 0, 0)

    # -- time -------------------------------------------------------------------------------------------------------

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """From here on, events belong to this phase."""
        self._forward.aside = False
        self._phase = len(self.trace.phases)
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self.trace.events.append(Event(EventKind.PHASE, self._phase))

    def rename_phase(self, kind: PhaseKind) -> None:
        """The phase that is running has turned out to be of this kind."""
        self.trace.phases[self._phase] = self.phase._replace(kind=kind)

    def stand_aside(self) -> None:
        """This is another thread: what it takes is for the first one to be given, until it begins a phase itself."""
        with self.lock:
            if not self.threads:
                self.threads, self._aside = True, len(self.trace.phases)
                self.trace.phases.append(Phase(PhaseKind.INPUTS, 0, 0))
            self._forward.aside = True

    @property
    def phase(self) -> Phase:
        """The phase that is running."""
        return self.trace.phases[self._phase]

    @property
    def phase_index(self) -> int:
        """Its index in the trace."""
        return self._phase

    def _module_event(self, kind: EventKind, module: int) -> None:
        if not self._closed:
            self.trace.events.append(_new(Event, (kind, module)))

    # -- births and deaths ------------------------------------------------------------------------------------------

    def allocate(
        self,
        storage: torch.UntypedStorage,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: Place,
    ) -> int:
        """A new storage was born; returns its index. Its death is noted when its last reference goes."""
        address = storage._cdata
        index = self._append(storage.nbytes(), shape, dtype, device, op, place, hidden=False)
        if self.communicates and device != "cpu":
            owner = communication(sys._getframe(1), self._name_of)
            if owner is not None:
                self.trace.owners[index] = owner
        ref = _StorageRef(storage, self._died)
        ref.address = address
        ref.index = index
        self._refs[index] = ref
        self.live[address] = index
        return index

    def allocate_hidden(self, num_bytes: int, op: str, place: Place, device: str) -> int:
        """Record memory that a library takes and no tensor shows; the caller frees it with `free_hidden`, also where
        its operator raises."""
        if not self.counts_hidden:
            return NONE
        return self._append(num_bytes, (num_bytes,), torch.uint8, device, op, place, hidden=True)

    def free_hidden(self, index: int) -> None:
        """Record that the library has released what `allocate_hidden` returned as `index`."""
        if index != NONE:
            self._append_free(index)

    def release(self, index: int) -> None:
        """The memory of a living storage was given back although the storage lives on (it was resized)."""
        ref = self._refs.pop(index)
        self.live.pop(ref.address, None)
        self._append_free(index)

    def process_ended(self, first: int) -> None:
        """A process of the program is over, and with it all memory that it took: storage number `first` and later.
        What keeps some of it alive here (a hook that its own tensor holds) would not outlive a real one."""
        for index in self._refs:
            if index >= first:
                self._append_free(index)
                self._gone.add(index)

    def empty_cache(self) -> None:
        """The program called torch.cuda.empty_cache()."""
        if not self._closed:
            self.trace.events.append(Event(EventKind.EMPTY_CACHE, 0))

    def take_from(self, pool: int, *, of_thread: bool) -> tuple[int, bool]:
        """Memory of cards is taken from this private pool from here on (0: from the default one).

        Args:
            of_thread: whether what backward passes take is not: they run in threads of their own.

        Returns:
            What was said before.
        """
        before = self._pool, self._pool_of_thread
        self._pool, self._pool_of_thread = pool, of_thread
        return before

    def pool_is_free(self, pool: int) -> None:
        """Nothing keeps a private pool any more."""
        if not self._closed:
            self.trace.events.append(Event(EventKind.POOL_FREE, pool))

    def _settle_pool(self) -> None:
        pool = 0 if self._pool_of_thread and _current_graph_task() != -1 else self._pool
        if pool != self._pool_of_trace:
            self._pool_of_trace = pool
            self.trace.events.append(Event(EventKind.POOL, pool))

    def _append(
        self,
        num_bytes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: Place,
        *,
        hidden: bool,
    ) -> int:
        with self.lock:
            trace = self.trace
            index = len(trace.storages)
            trace.storages.append(
                _new(
                    Storage,
                    (
                        num_bytes,
                        tuple(shape),
                        _DTYPE_NAMES[dtype],
                        device,
                        self.op_index(op),
                        place.module,
                        place.source,
                        self._aside if self.threads and self._forward.aside else self._phase,
                        place.forward_event,
                        hidden,
                    ),
                )
            )
            if device != "cpu" and ((stream := self.streams.current(device)) or self._stream_of_trace):
                if stream:
                    self._on_stream[index] = stream
                if stream != self._stream_of_trace:
                    self._stream_of_trace = stream
                    trace.events.append(Event(EventKind.STREAM, stream))
            if device != "cpu" and (self._pool or self._pool_of_trace):
                self._settle_pool()
            trace.events.append(_new(Event, (_ALLOC, index)))
            if device != "cpu":
                self.live_bytes += num_bytes
                if self.live_bytes > self.peak_bytes:
                    self.peak_bytes = self.live_bytes
                if self.refusal is not None and (message := self.refusal(device)) is not None:
                    self._refuse(index, message)
            return index

    def _refuse(self, index: int, message: str) -> None:
        """The card has no room for what was just asked for."""
        self.trace.refused.append(index)
        self._append_free(index)
        raise torch.OutOfMemoryError(message)

    def _died(self, ref: Any) -> None:
        if self._closed or self._refs.pop(ref.index, None) is None:
            return
        if self.live.get(ref.address) == ref.index:
            del self.live[ref.address]
            self.on_death(ref.address)
        self._append_free(ref.index)

    def _append_free(self, index: int) -> None:
        if index in self._gone:
            return
        with self.lock:
            self.trace.events.append(_new(Event, (_FREE, index)))
            storage = self.trace.storages[index]
            if storage.device != "cpu":
                self.live_bytes -= storage.num_bytes

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._closed

    def stop(self) -> None:
        """Record nothing from now on, and still know which storages were living."""
        self._closed = True
        self.streams.close()

    def close(self) -> None:
        """Stop watching: what dies from now on (the caller's own clean-up) is not part of the run."""
        self.stop()
        self._refs.clear()
        self.live.clear()
        self._forward = Forward()

    # -- what a storage turned out to be ----------------------------------------------------------------------------

    def index_of(self, tensor: torch.Tensor) -> int:
        """Index in the trace of the living storage below `tensor`, which may be any that the program has; NONE if that
        is not known."""
        try:
            return self.live.get(unwrapped(tensor).untyped_storage()._cdata, NONE)
        except (NotImplementedError, RuntimeError):  # it has none: sparse, or a subclass around others
            return NONE

    def _name_of(self, tensor: torch.Tensor) -> str:
        owner = self._owner(tensor)
        return "" if owner is None else owner.name

    def own(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor`'s storage has a role. The first name stays, so that a tied weight keeps its own; what has none yet
        may get one, and what a model is fed with, or a collective has made, may turn out to be trained."""
        with torch._C.DisableTorchFunction():  # what is read here would each pass through the program's modes
            for part in parts_of_sparse(tensor) or [tensor]:
                index = self.index_of(part)
                if index != NONE:
                    known = self.trace.owners.setdefault(index, owner)
                    if known.role in _MAY_CHANGE or (owner.name and not known.name):
                        self.trace.owners[index] = owner
                        if known.role is Role.KV_CACHE:
                            self.keeps(index)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator works on these. If a backward node runs it, on another stream than that on which a gradient was
        made, the engine has lent it and made the node's stream wait (`InputBuffer::add` of autograd/input_buffer.cpp).
        """
        if _current_graph_task() == -1:
            return
        for tensor in tensors:
            index = self.live.get(tensor.untyped_storage()._cdata, NONE)
            if index == NONE or self.trace.storages[index].phase != self._phase:
                continue
            card, made_on = self.trace.storages[index].device, self._on_stream.get(index, 0)
            stream = None if card == "cpu" else self.streams.of_node(card)
            if stream is not None and stream != made_on and (index, stream) not in self._lent:
                self._lent.add((index, stream))
                self.streams.use(index, stream)
                self.streams.wait(self.streams.now(card, made_on), (card, stream))

    def gathered(self, made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """A collective has gathered what all ranks gave. Of a parameter's parts that is the parameter, whole: a program
        may do by itself what FSDP does."""
        known = [owner for one in given if (owner := self._owner(one)) is not None]
        parts = [owner for owner in known if owner.role is Role.PARAMETER]
        for index in map(self.index_of, made if parts else ()):
            if index != NONE:
                self.trace.owners.setdefault(index, Owner(Role.UNSHARDED, parts[0].name or "a parameter"))

    def reduced(self, given: Iterable[torch.Tensor]) -> None:
        """A collective reduces these over the ranks. A copy that was made for it, after a backward, is its own."""
        if self.phase.kind in (PhaseKind.FORWARD, PhaseKind.BACKWARD):
            return
        for tensor in given:
            index = self.index_of(tensor)
            op = None if index == NONE or index in self.trace.owners else self.trace.storages[index].op
            if op is not None and self.trace.ops[op] in _COPIES:
                self.trace.owners[index] = Owner(Role.COMMUNICATION, "reduce-scatter")

    def _owner(self, tensor: torch.Tensor) -> Owner | None:
        return self.trace.owners.get(self.index_of(tensor))

    def keeps(self, index: int) -> None:
        """The program keeps a storage for later tokens. Buffers and inputs may turn out to be such."""
        known = self.trace.owners.get(index)
        if known is None or known.role in (Role.BUFFER, Role.INPUT):
            self.trace.owners[index] = Owner(Role.KV_CACHE, known.name if known else "")

    def is_alive(self, index: int) -> bool:
        """Whether a storage that a tensor shows was not freed yet."""
        return index in self._refs

    def made_outside_modules(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in memory of this run that no module's code allocated."""
        index = self.index_of(next(iter(parts_of_sparse(tensor)), tensor))
        return index != NONE and self.trace.storages[index].module == NONE

    # -- where the program is ---------------------------------------------------------------------------------------

    def op_index(self, op: str) -> int:
        """Index of an operator's name in the trace."""
        index = self._op_index.get(op)
        if index is None:
            index = self._op_index[op] = len(self.trace.ops)
            self.trace.ops.append(op)
        return index

    def place(self, frame: FrameType | None) -> Place:
        """Where the program is; `frame` is the innermost frame to consider.

        In a backward pass an operator is attributed to the forward operator that it differentiates, found by the
        autograd node's sequence number. Modules that run inside a backward pass (recomputation) count as themselves.
        """
        module = self.modules.current
        if module == NONE and _current_graph_task() != -1:
            node = _current_node()
            if node is not None:
                number, forward = node._sequence_nr(), self._forward
                if number != forward.node:
                    forward.node = number
                    forward.node_start = len(self.trace.storages)
                position = bisect.bisect_right(forward.sequence, number)
                if position < len(forward.places):
                    return forward.places[position]
                variable = getattr(node, "variable", None)
                if variable is not None:
                    return Place(self.modules.module_of(variable), NONE, NONE)
                return Place(NONE, self._source(frame), NONE)
        return Place(module, self._source(frame), NONE)

    def made_by_node(self, storage: torch.UntypedStorage) -> bool:
        """Whether the autograd node that is running made `storage`."""
        return self.live.get(storage._cdata, NONE) >= self._forward.node_start

    def note_forward(self, place: Place) -> None:
        """An operator ran forward here: backward operators with its sequence number will be attributed to it."""
        number, forward = _sequence_number(), self._forward
        sequence = forward.sequence
        if not sequence or sequence[-1] < number:
            sequence.append(number)
            forward.places.append(Place(place.module, place.source, len(self.trace.events)))

    def _source(self, frame: FrameType | None) -> int:
        codes = self._codes
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            if known is None:
                known = codes[id(code)] = (code, self.is_program(code))
            if known[1]:
                at = (id(code), frame.f_lasti)
                index = self._source_at.get(at)
                if index is None:
                    index = self._source_at[at] = self._line(code, frame.f_lineno)
                return index
            frame = frame.f_back
        return NONE

    def _line(self, code: CodeType, number: int) -> int:
        """Index of a line of the program in the trace."""
        index = self._source_index.get((code, number))
        if index is None:
            index = self._source_index[code, number] = self.line(f"{code.co_filename}:{number} {code.co_name}")
        return index

    def line(self, text: str) -> int:
        """Index of a line, as `file:number function`, in the trace."""
        index = self._line_index.get(text)
        if index is None:
            index = self._line_index[text] = len(self.trace.sources)
            self.trace.sources.append(text)
        return index

    @staticmethod
    def is_program(code: CodeType) -> bool:
        """Whether this is the program's code, not Python's, torch's or memprof's (whose own workloads are programs)."""
        return Recorder.is_program_file(code.co_filename)

    @staticmethod
    def is_program_file(name: str) -> bool:
        """The same of the file that code is in."""
        if name.startswith(_PYTHON_DIR) and "-packages" not in name:
            return False
        return not (
            name.startswith((_TORCH_DIR, _DEPRECATIONS, "<frozen", "<string>", "<eval_with_key>", *GENERATED))
            or (name.startswith(_MEMPROF_DIR) and not name.startswith(_OWN_WORKLOADS))
        )

    def caller(self) -> int:
        """Index of the line outside torch and memprof that is running now."""
        return self._source(sys._getframe(1))


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()
