"""Roles of storages in the program (parameter, gradient, input, ...), and the storages' names."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from memprof.trace.events import NONE, Owner, PhaseKind, Role
from memprof.watch.sharding import find_communication_owner
from memprof.watch.storage_table import StorageTable
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import get_sparse_parts

_PROVISIONAL_ROLES = (Role.INPUT, Role.COMMUNICATION)
_COPY_OPERATORS = ("aten._to_copy", "aten.cat")


class OwnerTable:
    """Table of the owners (role and name) of the storages in a trace."""

    def __init__(self, writer: TraceWriter, storages: StorageTable) -> None:
        self._writer = writer
        self._trace = writer.trace
        self._storages = storages

    @property
    def is_naming_communication(self) -> bool:
        """Return whether the program has joined a process group, so that memory for communication is identified."""
        return self._storages.on_allocate is not None

    def start_naming_communication(self) -> None:
        """Identify torch's memory for communication between processes from now on."""
        self._storages.on_allocate = self._name_if_communication

    def _name_if_communication(self, index: int) -> None:
        if self._trace.storages[index].device != "cpu":
            owner = find_communication_owner(sys._getframe(1), self._get_name)
            if owner is not None:
                self._trace.owners[index] = owner

    def _get_name(self, tensor: torch.Tensor) -> str:
        owner = self._get_owner(tensor)
        return "" if owner is None else owner.name

    def _get_owner(self, tensor: torch.Tensor) -> Owner | None:
        return self._trace.owners.get(self._storages.get_index(tensor))

    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Set the role and name of `tensor`'s storage. The first name stays, so that a tied weight keeps its name; a
        storage without name may get one, and an input or a collective's output may become a parameter."""
        with torch.DisableTorchFunction():  # each attribute read would pass through the program's modes
            for part in get_sparse_parts(tensor) or [tensor]:
                index = self._storages.get_index(part)
                if index != NONE:
                    known = self._trace.owners.setdefault(index, owner)
                    if known.role in _PROVISIONAL_ROLES or (owner.name and not known.name):
                        self._trace.owners[index] = owner
                        if known.role is Role.KV_CACHE:
                            self.mark_kv_cache(index)

    def mark_kv_cache(self, index: int) -> None:
        """Record that the program keeps a storage as KV cache. Buffers and inputs may become KV cache."""
        known = self._trace.owners.get(index)
        if known is None or known.role in (Role.BUFFER, Role.INPUT):
            self._trace.owners[index] = Owner(Role.KV_CACHE, known.name if known else "")

    def mark_gathered(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Record that a collective has gathered `outputs` from the `inputs` of all ranks. Gathered shards of a
        parameter are the unsharded parameter: a program may shard as FSDP does."""
        owners = [owner for one in inputs if (owner := self._get_owner(one)) is not None]
        parts = [owner for owner in owners if owner.role is Role.PARAMETER]
        for index in map(self._storages.get_index, outputs if parts else ()):
            if index != NONE:
                self._trace.owners.setdefault(index, Owner(Role.UNSHARDED, parts[0].name or "a parameter"))

    def mark_reduced(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a collective reduces `tensors` over the ranks; copies made for the collective are communication
        memory."""
        if self._writer.phase.kind in (PhaseKind.FORWARD, PhaseKind.BACKWARD):
            return
        for tensor in tensors:
            index = self._storages.get_index(tensor)
            op = None if index == NONE or index in self._trace.owners else self._trace.storages[index].op
            if op is not None and self._trace.ops[op] in _COPY_OPERATORS:
                self._trace.owners[index] = Owner(Role.COMMUNICATION, "reduce-scatter")

    def is_allocated_outside_modules(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in memory of this run that no module's code allocated."""
        index = self._storages.get_index(next(iter(get_sparse_parts(tensor)), tensor))
        return index != NONE and self._trace.storages[index].module == NONE
