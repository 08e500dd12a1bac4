"""Table of what each storage is for: its role in the program (parameter, gradient, input, ...) and its name."""

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
    """Table of the owner (role and name) of each storage in a trace."""

    def __init__(self, writer: TraceWriter, storages: StorageTable) -> None:
        self._writer = writer
        self._trace = writer.trace
        self._storages = storages

    @property
    def is_naming_communication(self) -> bool:
        """Return whether communication memory is being identified: the program has joined a process group."""
        return self._storages.on_allocate is not None

    def start_naming_communication(self) -> None:
        """Identify memory that torch.distributed allocates from now on, and give it the role COMMUNICATION."""
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
        """Set the owner of the storage of `tensor`, unless it has one already (tied weights). An owner with a name
        replaces one without, and any owner replaces one with the role INPUT or COMMUNICATION."""
        with torch.DisableTorchFunction():  # each attribute read would pass through the program's modes
            for part in get_sparse_parts(tensor) or [tensor]:
                index = self._storages.get_index(part)
                if index != NONE:
                    previous = self._trace.owners.setdefault(index, owner)
                    if previous.role in _PROVISIONAL_ROLES or (owner.name and not previous.name):
                        self._trace.owners[index] = owner
                        if previous.role is Role.KV_CACHE:
                            self.mark_kv_cache(index)

    def mark_kv_cache(self, index: int) -> None:
        """Give the storage `index` the role KV_CACHE if it has no role, or is a buffer or input."""
        owner = self._trace.owners.get(index)
        if owner is None or owner.role in (Role.BUFFER, Role.INPUT):
            self._trace.owners[index] = Owner(Role.KV_CACHE, owner.name if owner else "")

    def mark_gathered(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Record that a collective has gathered `outputs` from the `inputs` of all ranks. If an input is a parameter
        (a shard, in a program with its own sharding), the outputs get the role UNSHARDED."""
        owners = [owner for tensor in inputs if (owner := self._get_owner(tensor)) is not None]
        shard_owners = [owner for owner in owners if owner.role is Role.PARAMETER]
        for index in map(self._storages.get_index, outputs if shard_owners else ()):
            if index != NONE:
                self._trace.owners.setdefault(index, Owner(Role.UNSHARDED, shard_owners[0].name or "a parameter"))

    def mark_reduced(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a collective reduces `tensors` over the ranks. Tensors that are copies, made for the collective
        outside forward and backward, get the role COMMUNICATION."""
        if self._writer.phase.kind in (PhaseKind.FORWARD, PhaseKind.BACKWARD):
            return
        for tensor in tensors:
            index = self._storages.get_index(tensor)
            op = None if index == NONE or index in self._trace.owners else self._trace.storages[index].op
            if op is not None and self._trace.ops[op] in _COPY_OPERATORS:
                self._trace.owners[index] = Owner(Role.COMMUNICATION, "reduce-scatter")

    def is_allocated_outside_modules(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of `tensor` was allocated in this run, outside all module calls."""
        index = self._storages.get_index(next(iter(get_sparse_parts(tensor)), tensor))
        return index != NONE and self._trace.storages[index].module == NONE
