"""Writer of the Trace of a run: appends phases, module calls, allocations and frees."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memprof.torch_private import autograd
from memprof.trace.events import NONE, Event, EventKind, Module, Phase, PhaseKind, Storage, Trace
from memprof.watch.forward import CallSite
from memprof.watch.streams import Streams

_new_tuple: Any = tuple.__new__  # Makes a named tuple without its class's Python-level `__new__`.
_ALLOC, _FREE = EventKind.ALLOC, EventKind.FREE


class _ThreadState(threading.local):
    is_worker = False  # Whether this thread's allocations belong to no phase of other threads.


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


class ActivePool:
    """Recorder of the private memory pool (`torch.cuda.MemPool`, CUDA graphs) that serves allocations, if any."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.has_been_used = False  # Whether the program has ever used a private pool.
        self._closed = False
        # The active pool (0: the default pool), and whether only the activating thread uses the pool.
        self._active_pool, self._is_thread_local = 0, False
        self._last_pool = 0  # The pool of the last allocation in the trace.

    def select_pool(self, pool: int, *, is_thread_local: bool) -> tuple[int, bool]:
        """Allocate GPU memory from `pool` (0: the default pool) from now on; return the previous pool and flag.

        `is_thread_local`: only the current thread uses the pool, so backward passes, in threads of their own, do not.
        """
        previous = self._active_pool, self._is_thread_local
        self._active_pool, self._is_thread_local = pool, is_thread_local
        self.has_been_used = self.has_been_used or pool != 0
        return previous

    def record_allocation_pool(self) -> None:
        """Append a POOL event if the next allocation is from a different pool than the last one."""
        pool = 0 if self._is_thread_local and autograd.current_graph_task_id() != -1 else self._active_pool
        if pool != self._last_pool:
            self._last_pool = pool
            self._trace.events.append(Event(EventKind.POOL, pool))

    def append_pool_free(self, pool: int) -> None:
        """Append that `pool` is freed, because the last reference to it is gone."""
        if not self._closed:
            self._trace.events.append(Event(EventKind.POOL_FREE, pool))

    def close(self) -> None:
        """Stop appending events."""
        self._closed = True


class TraceWriter:
    """Writer that appends events, and the objects that events refer to, to one Trace.

    The caller must hold `lock` during `append_allocation` and `append_free`, which several threads may call.
    """

    def __init__(self, modules: list[Module]) -> None:
        self.trace = Trace(modules=modules)
        self.streams = Streams(self.trace)
        self.active_pool = ActivePool(self.trace)
        self.is_closed = False  # Whether nothing is recorded any more.
        self.lock = threading.RLock()
        self.has_worker_threads = (
            False  # Whether several threads run operators; each then holds the lock for the length of one.
        )
        self._worker_phase = NONE
        self._thread = _ThreadState()
        self._op_index: dict[str, int] = {}
        self.phase_index = NONE  # Index of the phase that is running.
        self.begin_phase(PhaseKind.OTHER, 0, 0)

    @property
    def phase(self) -> Phase:
        """Return the current phase."""
        return self.trace.phases[self.phase_index]

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase, to which allocations belong from now on, except those of worker threads."""
        self._thread.is_worker = False
        self.phase_index = len(self.trace.phases)
        self.trace.phases.append(Phase(kind, step, micro_batch))
        self.trace.events.append(Event(EventKind.PHASE, self.phase_index))

    def rename_phase(self, kind: PhaseKind) -> None:
        """Change the kind of the current phase to `kind`."""
        self.trace.phases[self.phase_index] = self.phase._replace(kind=kind)

    def mark_worker_thread(self) -> None:
        """Assign this thread's allocations to a phase of their own (INPUTS), until this thread begins a phase."""
        with self.lock:
            if not self.has_worker_threads:
                self.has_worker_threads, self._worker_phase = True, len(self.trace.phases)
                self.trace.phases.append(Phase(PhaseKind.INPUTS, 0, 0))
            self._thread.is_worker = True

    def append_module_call(self, kind: EventKind, module: int) -> None:
        """Append that a module (by index) is entered or left; `kind` is `EventKind.ENTER` or `EventKind.EXIT`."""
        if not self.is_closed:
            self.trace.events.append(_new_tuple(Event, (kind, module)))

    def append_empty_cache(self) -> None:
        """Append that the program called `torch.cuda.empty_cache()`."""
        if not self.is_closed:
            self.trace.events.append(Event(EventKind.EMPTY_CACHE, 0))

    def append_allocation(
        self,
        num_bytes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        op: str,
        place: CallSite,
        hidden: bool,
    ) -> int:
        """Append a storage and its allocation event, preceded by any change of stream or pool; return the index.

        `shape` and `dtype` are those of the storage's first tensor; a `hidden` storage has no tensor.
        """
        trace = self.trace
        index = len(trace.storages)
        op_index = self._op_index.get(op)
        trace.storages.append(
            _new_tuple(
                Storage,
                (
                    num_bytes,
                    tuple(shape),
                    _DTYPE_NAMES[dtype],
                    device,
                    self.get_op_index(op) if op_index is None else op_index,
                    place.module,
                    place.source,
                    self._worker_phase if self.has_worker_threads and self._thread.is_worker else self.phase_index,
                    place.forward_event,
                    hidden,
                ),
            )
        )
        if device != "cpu":
            if self.streams.uses_other_streams:
                self.streams.record_allocation_stream(index, device)
            if self.active_pool.has_been_used:
                self.active_pool.record_allocation_pool()
        trace.events.append(_new_tuple(Event, (_ALLOC, index)))
        return index

    def append_free(self, index: int) -> Storage:
        """Append that the storage `index` is freed; return the storage."""
        self.trace.events.append(_new_tuple(Event, (_FREE, index)))
        return self.trace.storages[index]

    def get_op_index(self, op: str) -> int:
        """Return the trace's index of the operator name `op`, which is added if new."""
        index = self._op_index.get(op)
        if index is None:
            index = self._op_index[op] = len(self.trace.ops)
            self.trace.ops.append(op)
        return index

    def close(self) -> None:
        """Stop appending module calls, streams, pools and frees of collected storages (see storage_table.py)."""
        self.is_closed = True
        self.streams.close()
        self.active_pool.close()
