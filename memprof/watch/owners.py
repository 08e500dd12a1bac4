"""Roles of storages in the program (parameter, gradient, input, ...), and the storages' names."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from memprof.trace.events import NONE, Owner, PhaseKind, Role
from memprof.watch.sharding import communication
from memprof.watch.storage_table import StorageTable
from memprof.watch.trace_writer import TraceWriter
from memprof.watch.wrappers import parts_of_sparse

_PROVISIONAL_ROLES = (Role.INPUT, Role.COMMUNICATION)
_COPIES = ("aten._to_copy", "aten.cat")


class OwnerTable:
    """Table of the owners (role and name) of the storages in a trace."""

    def __init__(self, writer: TraceWriter, storages: StorageTable) -> None:
        self._writer = writer
        self._trace = writer.trace
        self._storages = storages

    @property
    def names_communication(self) -> bool:
        """Return whether the program has joined a process group, so that memory for communication is identified."""
        return self._storages.on_allocate is not None

    def name_communication(self) -> None:
        """Identify torch's memory for communication between processes from now on."""
        self._storages.on_allocate = self._name_if_communication

    def _name_if_communication(self, index: int) -> None:
        if self._trace.storages[index].device != "cpu":
            owner = communication(sys._getframe(1), self._get_name)
            if owner is not None:
                self._trace.owners[index] = owner

    def _get_name(self, tensor: torch.Tensor) -> str:
        owner = self._get_owner(tensor)
        return "" if owner is None else owner.name

    def _get_owner(self, tensor: torch.Tensor) -> Owner | None:
        return self._trace.owners.get(self._storages.index_of(tensor))

    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Set the role and name of `tensor`'s storage. The first name stays, so that a tied weight keeps its name; a
        storage without name may get one, and an input or a collective's output may become a parameter."""
        with torch.DisableTorchFunction():  # each attribute read would pass through the program's modes
            for part in parts_of_sparse(tensor) or [tensor]:
                index = self._storages.index_of(part)
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

    def mark_gathered(self, made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """Record that a collective has gathered `made` from the tensors `given` of all ranks. Gathered parts of a
        parameter are the whole parameter: a program may shard as FSDP does."""
        known = [owner for one in given if (owner := self._get_owner(one)) is not None]
        parts = [owner for owner in known if owner.role is Role.PARAMETER]
        for index in map(self._storages.index_of, made if parts else ()):
            if index != NONE:
                self._trace.owners.setdefault(index, Owner(Role.UNSHARDED, parts[0].name or "a parameter"))

    def mark_reduced(self, given: Iterable[torch.Tensor]) -> None:
        """Record that a collective reduces `given` over the ranks; copies made for it are communication memory."""
        if self._writer.phase.kind in (PhaseKind.FORWARD, PhaseKind.BACKWARD):
            return
        for tensor in given:
            index = self._storages.index_of(tensor)
            op = None if index == NONE or index in self._trace.owners else self._trace.storages[index].op
            if op is not None and self._trace.ops[op] in _COPIES:
                self._trace.owners[index] = Owner(Role.COMMUNICATION, "reduce-scatter")

    def is_made_outside_modules(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in memory of this run that no module's code allocated."""
        index = self._storages.index_of(next(iter(parts_of_sparse(tensor)), tensor))
        return index != NONE and self._trace.storages[index].module == NONE
