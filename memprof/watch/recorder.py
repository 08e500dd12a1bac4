"""The recorder of a run: a Trace, and what writes it.

It knows nothing of how a run is made. The virtual GPU tells `storages` of every new storage, at a place that
`attribution` finds; `owners` keeps what it turned out to be, and `writer` appends what happens to the Trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memprof.trace.events import NONE
from memprof.watch.attribution import Attribution
from memprof.watch.modules import ModuleTracker
from memprof.watch.owners import OwnerTable
from memprof.watch.program_code import is_program_file
from memprof.watch.storage_table import StorageTable
from memprof.watch.trace_writer import TraceWriter

_current_graph_task = torch._C._current_graph_task_id


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
        if _current_graph_task() == -1:
            return
        for tensor in tensors:
            index = self.storages.live.get(tensor.untyped_storage()._cdata, NONE)
            if index != NONE and self.trace.storages[index].phase == self.writer.phase_index:
                self.streams.lend_to_node(index)

    # -- as the virtual GPU and its edges name them yet ---------------------------------------------------------------

    place = property(lambda self: self.attribution.place)
    caller = property(lambda self: self.attribution.caller)
    live = property(lambda self: self.storages.live)
    live_bytes = property(lambda self: self.storages.live_bytes)
    peak_bytes = property(
        lambda self: self.storages.peak_bytes, lambda self, value: setattr(self.storages, "peak_bytes", value)
    )
    index_of = property(lambda self: self.storages.index_of)
    allocate_hidden = property(lambda self: self.storages.allocate_hidden)
    counts_hidden = property(
        lambda self: self.storages.counts_hidden, lambda self, value: setattr(self.storages, "counts_hidden", value)
    )
    refusal = property(lambda self: self.storages.refusal, lambda self, value: setattr(self.storages, "refusal", value))
    on_death = property(
        lambda self: self.storages.on_death, lambda self, value: setattr(self.storages, "on_death", value)
    )
    communicates = property(
        lambda self: self.owners.names_communication, lambda self, value: self.owners.name_communication()
    )
    own = property(lambda self: self.owners.set_owner)
    made_outside_modules = property(lambda self: self.owners.is_made_outside_modules)
    phase = property(lambda self: self.writer.phase)
    begin_phase = property(lambda self: self.writer.begin_phase)
    lock = property(lambda self: self.writer.lock)
    stand_aside = property(lambda self: self.writer.mark_worker_thread)
    is_program_file = staticmethod(is_program_file)

    def stop(self) -> None:
        """Record nothing from now on, and still know which storages were living."""
        self.writer.close()

    def close(self) -> None:
        """Stop watching: what dies from now on (the caller's own clean-up) is not part of the run."""
        self.stop()
        self.storages.clear()
        self.attribution.clear()
