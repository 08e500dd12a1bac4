"""Appends to the Trace of a run: its phases, its module calls, and the storages that it allocates and frees."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memprof.torch_private import autograd
from memprof.trace.events import NONE, Event, EventKind, Module, Phase, PhaseKind, Storage, Trace
from memprof.watch.forward import CallSite
from memprof.watch.streams import Streams

_new: Any = tuple.__new__  # Makes a named tuple without the Python function that its class has for that.
_ALLOC, _FREE = EventKind.ALLOC, EventKind.FREE


class _ThreadState(threading.local):
    is_worker = False  # Whether what this thread allocates belongs to no phase of the others.


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


class ActivePool:
    """Keeps track of the private pool (`torch.cuda.MemPool`) that memory is taken from, if any ever is."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.used = False  # Whether the program has ever taken memory from a private pool.
        self._closed = False
        # The active pool (0: the default one), and whether it is that of the thread that activated it alone.
        self._active, self._of_thread = 0, False
        self._of_trace = 0  # The pool of the last allocation in the trace.

    def select(self, pool: int, *, of_thread: bool) -> tuple[int, bool]:
        """Take memory of GPUs from `pool` (0: the default one) from here on; return what was set before.

        `of_thread`: backward passes, which run in threads of their own, take none of it.
        """
        before = self._active, self._of_thread
        self._active, self._of_thread = pool, of_thread
        self.used = self.used or pool != 0
        return before

    def note_allocation(self) -> None:
        """Append the change of pool, if the allocation that comes next is from another one than the last."""
        pool = 0 if self._of_thread and autograd.current_graph_task_id() != -1 else self._active
        if pool != self._of_trace:
            self._of_trace = pool
            self._trace.events.append(Event(EventKind.POOL, pool))

    def append_release(self, pool: int) -> None:
        """Append that nothing keeps `pool` any more."""
        if not self._closed:
            self._trace.events.append(Event(EventKind.POOL_FREE, pool))

    def close(self) -> None:
        """Append nothing from now on."""
        self._closed = True


class TraceWriter:
    """Appends events, and what they refer to, to one Trace.

    `lock` is to be held for `allocate` and `free`, which several threads may call.
    """

    def __init__(self, modules: list[Module]) -> None:
        self.trace = Trace(modules=modules)
        self.streams = Streams(self.trace)
        self.active_pool = ActivePool(self.trace)
        self.closed = False  # Whether nothing is recorded any more.
        self.lock = threading.RLock()
        self.threads = False  # Whether several threads run operators; each then holds the lock for the length of one.
        self._worker_phase = NONE
        self._thread = _ThreadState()
        self._op_index: dict[str, int] = {}
        self.phase_index = NONE  # Index of the phase that is running.
        self.begin_phase(PhaseKind.OTHER, 0, 0)

    @property
    def phase(self) -> Phase:
        """Return the phase that is running."""
        return self.trace.phases[self.phase_index]

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase, to which what this thread allocates belongs from here on."""
        self._thread.is_worker = False
        self.phase_index = len(self.trace.phases)
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self.trace.events.append(Event(EventKind.PHASE, self.phase_index))

    def rename_phase(self, kind: PhaseKind) -> None:
        """Say of which kind the running phase has turned out to be."""
        self.trace.phases[self.phase_index] = self.phase._replace(kind=kind)

    def mark_worker_thread(self) -> None:
        """Count what this thread allocates as inputs of the first one, until it begins a phase itself."""
        with self.lock:
            if not self.threads:
                self.threads, self._worker_phase = True, len(self.trace.phases)
                self.trace.phases.append(Phase(PhaseKind.INPUTS, 0, 0))
            self._thread.is_worker = True

    def append_module_call(self, kind: EventKind, module: int) -> None:
        """Append that the module of this index is entered (`EventKind.ENTER`) or left (`EventKind.EXIT`)."""
        if not self.closed:
            self.trace.events.append(_new(Event, (kind, module)))

    def append_empty_cache(self) -> None:
        """Append that the program called `torch.cuda.empty_cache()`."""
        if not self.closed:
            self.trace.events.append(Event(EventKind.EMPTY_CACHE, 0))

    def allocate(
        self,
        num_bytes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: CallSite,
        hidden: bool,
    ) -> int:
        """Append a storage and its allocation, with the change of stream or pool before it; return its index.

        `shape` and `dtype` are those of the tensor that it is made for; one that is `hidden` no tensor shows.
        """
        trace = self.trace
        index = len(trace.storages)
        op_index = self._op_index.get(op)
        trace.storages.append(
            _new(
                Storage,
                (
                    num_bytes,
                    tuple(shape),
                    _DTYPE_NAMES[dtype],
                    device,
                    self.op_index(op) if op_index is None else op_index,
                    place.module,
                    place.source,
                    self._worker_phase if self.threads and self._thread.is_worker else self.phase_index,
                    place.forward_event,
                    hidden,
                ),
            )
        )
        if device != "cpu":
            if self.streams.several:
                self.streams.note_allocation(index, device)
            if self.active_pool.used:
                self.active_pool.note_allocation()
        trace.events.append(_new(Event, (_ALLOC, index)))
        return index

    def free(self, index: int) -> Storage:
        """Append that the storage of this index is freed; returns it."""
        self.trace.events.append(_new(Event, (_FREE, index)))
        return self.trace.storages[index]

    def op_index(self, op: str) -> int:
        """Return the index of an operator's name in the trace, which has it from here on."""
        index = self._op_index.get(op)
        if index is None:
            index = self._op_index[op] = len(self.trace.ops)
            self.trace.ops.append(op)
        return index

    def close(self) -> None:
        """Append no module calls, streams and pools from now on, nor (storage_table.py) frees of storages that die."""
        self.closed = True
        self.streams.close()
        self.active_pool.close()
