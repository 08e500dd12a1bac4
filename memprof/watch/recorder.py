"""The recorder of a run: a Trace, and what writes it.

It knows nothing of how a run is made. The virtual GPU tells `storages` of every new storage, at a place that
`attribution` finds; `owners` keeps what it turned out to be, and `writer` appends what happens to the Trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memprof.torch_private import autograd
from memprof.trace.events import NONE
from memprof.watch.attribution import Attribution
from memprof.watch.modules import ModuleTracker
from memprof.watch.owners import OwnerTable
from memprof.watch.storage_table import StorageTable
from memprof.watch.trace_writer import TraceWriter


class Recorder:
    """Puts the parts that record one Trace together; several threads may tell them of storages."""

    def __init__(self, modules: ModuleTracker) -> None:
        self.modules = modules
        self.writer = TraceWriter(modules.table)
        self.trace, self.streams, self.active_pool = self.writer.trace, self.writer.streams, self.writer.active_pool
        self.storages = StorageTable(self.writer)
        self.attribution = Attribution(self.trace, modules)
        self.owners = OwnerTable(self.writer, self.storages)
        modules.listener = self.writer.append_module_call

    def record_stream_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a backward node works on these, where its stream is another than that on which they were made."""
        if autograd.current_graph_task_id() == -1:
            return
        for tensor in tensors:
            index = self.storages.live.get(tensor.untyped_storage()._cdata, NONE)
            if index != NONE and self.trace.storages[index].phase == self.writer.phase_index:
                self.streams.lend_to_node(index)

    def stop(self) -> None:
        """Record nothing from now on, and still know which storages were living."""
        self.writer.close()

    def close(self) -> None:
        """Stop watching: what is freed from now on (the caller's own clean-up) is not part of the run."""
        self.stop()
        self.storages.clear()
        self.attribution.clear()
