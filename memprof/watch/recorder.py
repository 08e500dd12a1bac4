"""Recorder of a run: a Trace, and the objects that write it.

The virtual GPU reports each new storage to `storages`, with the call site that `attribution` finds. `owners` has the
roles of the storages. `writer` appends events to the Trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memprof.torch_private import autograd
from memprof.trace.events import NONE, InnerCall
from memprof.watch.attribution import Attribution
from memprof.watch.modules import ModuleTracker
from memprof.watch.owners import OwnerTable
from memprof.watch.storage_table import StorageTable
from memprof.watch.trace_writer import TraceWriter


class Recorder:
    """Recorder of one Trace: writer, storage table, owner table and attribution. Several threads may use it."""

    def __init__(self, modules: ModuleTracker) -> None:
        self.modules = modules
        self.writer = TraceWriter(modules.table)
        self.trace, self.streams, self.active_pool = self.writer.trace, self.writer.streams, self.writer.active_pool
        self.storages = StorageTable(self.writer)
        self.attribution = Attribution(self.trace, modules)
        self.owners = OwnerTable(self.writer, self.storages)
        modules.on_enter_or_exit = self.writer.append_module_call
        modules.on_first_inner_call = self._record_inner_call

    def _record_inner_call(self, module: int) -> None:
        self.trace.inner_calls.append(InnerCall(module, self.attribution.find_caller_line()))

    def record_stream_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that the running backward node uses `tensors`, some of which may be from other streams."""
        if autograd.current_graph_task_id() == -1:
            return
        for tensor in tensors:
            index = self.storages.index_by_address.get(tensor.untyped_storage()._cdata, NONE)
            if index != NONE and self.trace.storages[index].phase == self.writer.phase_index:
                self.streams.record_node_use(index)

    def stop_recording(self) -> None:
        """Stop recording; `storages` still knows which storages are live."""
        self.writer.close()

    def close(self) -> None:
        """Stop recording and tracking storages: later frees, as in the caller's clean-up, are not part of the run."""
        self.stop_recording()
        self.storages.stop_watching()
        self.attribution.clear()
