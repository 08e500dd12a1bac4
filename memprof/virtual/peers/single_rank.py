"""Collectives of a rank that runs alone: the tensors of the other ranks are assumed equal to this rank's (SPMD).

Only known values are communicated: a tensor that receives unknown values becomes unknown. The same rules apply to
objects, which torch pickles into tensors of known bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.limits import find_program_line
from memprof.virtual.peers.known_values import GroupRank, KnownValues, Parts, has_no_data
from memprof.virtual.values import Values
from memprof.virtual.values.budget import is_cheap_to_compute

_aten = torch.ops.aten
_EQUAL_ON_ALL_RANKS = "taken to be equal on all ranks, as it is on this one"
_IDEMPOTENT_REDUCTIONS = ("AVG", "MIN", "MAX", "BAND", "BOR")  # of equal values, they return the value
# Function that completes a collective when the program waits; for a receive, returns the sender. None: is complete.
WaitFunction = Callable[[], object] | None


class SingleRankBackend:
    """The values of collectives of a rank that runs alone."""

    def __init__(self, assume: Callable[[str], None], values: Values) -> None:
        self._assume = assume
        self._known = KnownValues(values)
        self._reported_assumptions: set[str] = set()
        # The last tensor that this rank sent, by shape and dtype, if it is small and known.
        self._last_sent: dict[Any, torch.Tensor] = {}

    # -- collectives of a group; `group` has this process's rank -------------------------------------

    def are_running(self, ranks: Sequence[int]) -> bool:
        """Return whether all `ranks` (global ranks) run."""
        return False

    def all_reduce(self, tensor: torch.Tensor, reduction: str, group: GroupRank) -> WaitFunction:
        """Reduce `tensor` in place over the ranks of `group`, assumed to have equal tensors."""
        self._reduce_equal_values(tensor, reduction, group.size)
        return None

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, group: GroupRank) -> WaitFunction:
        """Reduce `tensor` in place on rank `root`; tensors of other ranks, undefined with NCCL, do not change."""
        if root == group.rank:
            self._reduce_equal_values(tensor, reduction, group.size)
        return None

    def broadcast(self, tensor: torch.Tensor, root: int, group: GroupRank) -> WaitFunction:
        """Broadcast `tensor` from the rank `root`, whose tensor is assumed equal to this rank's."""
        if root != group.rank and self._known.is_known(tensor):
            self.report_assumption("broadcast", "What another rank broadcasts is taken to be what this one has itself")
        return None

    def all_gather(self, parts: Parts, tensor: torch.Tensor, group: GroupRank) -> WaitFunction:
        """Set each of `parts` to the tensor of a rank, assumed equal to this rank's `tensor`."""
        if any(map(self._known.is_known, (tensor, *parts.tensors))):
            self._gather_equal_values(parts.split(), tensor)
        return None

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, group: GroupRank) -> WaitFunction:
        """Gather on the rank `root`, as `all_gather` does; `parts` is None on other ranks."""
        return None if parts is None else self.all_gather(parts, tensor, group)

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, group: GroupRank) -> WaitFunction:
        """Set `output` to this rank's part of the reduced tensors."""
        if any(map(self._known.is_known, (output, *parts.tensors))):
            self._copy_values(output, parts.split()[group.rank])
            self._reduce_equal_values(output, reduction, group.size)
        return None

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, group: GroupRank) -> WaitFunction:
        """Set `output` to this rank's part of the tensors of the rank `root`; `parts` is None on other ranks."""
        if parts is None:
            self._forget_values(output, "scatter", "is given by a scatter of another")
        else:
            self._copy_values(output, parts.split()[group.rank])
        return None

    def all_to_all(self, outputs: Parts, inputs: Parts, group: GroupRank) -> WaitFunction:
        """Set each of `outputs` to the part of `inputs` that this rank sends to itself, as all ranks are equal."""
        if any(map(self._known.is_known, (*outputs.tensors, *inputs.tensors))):
            self._gather_equal_values(outputs.split(), inputs.split()[group.rank])
        return None

    def barrier(self, group: GroupRank) -> WaitFunction:
        """Return None: there are no other ranks to wait for."""
        return None

    def send(self, tensor: torch.Tensor, destination: int, tag: int, group: GroupRank) -> WaitFunction:
        """Send `tensor` to one other rank: record its values for `receive`."""
        if is_cheap_to_compute(tensor) and (known := self._known.read(tensor)) is not None:
            with torch.DisableTorchFunction(), disable_current_modes():
                self._last_sent[tensor.shape, tensor.dtype] = known.clone()
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, group: GroupRank) -> WaitFunction:
        """Receive `tensor` from another rank: assumed equal to the last tensor of this shape that this rank sent."""
        value = self._last_sent.get((tensor.shape, tensor.dtype))
        if value is None:
            self._forget_values(tensor, "receive", "receives from another")
        else:
            self.report_assumption(
                "sent", "What this rank receives from another is taken to be what it sent last of that shape"
            )
            self._known.write(_aten.copy_.default, tensor, value)
        return None

    # -- steps of the collectives -------------------------------------------------------------------------------------

    def report_assumption(self, kind: str, sentence: str) -> None:
        """Report an assumption, once for each `kind`, with the program's current line."""
        if kind not in self._reported_assumptions:
            self._reported_assumptions.add(kind)
            self._assume(f"{sentence} ({find_program_line()}).")

    def _copy_values(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the values of `source`, viewed in the shape of `target`, into `target`."""
        if self._known.is_known(target) or self._known.is_known(source):
            self._known.write(_aten.copy_.default, target, source.view(target.shape))

    def _forget_values(self, target: torch.Tensor, kind: str, description: str) -> None:
        """Make the values of `target`, which other ranks set, unknown; a real tensor on the host does not change."""
        self.report_assumption(kind, f"What this rank {description} is not known, for it runs alone")
        self._known.forget(target)

    def _reduce_equal_values(self, tensor: torch.Tensor, reduction: str, size: int) -> None:
        """Reduce `tensor` in place over `size` ranks that are assumed to have equal tensors."""
        if size == 1 or not self._known.is_known(tensor):
            return
        self.report_assumption("reduce", f"What is reduced over {size} ranks is {_EQUAL_ON_ALL_RANKS}")
        if reduction == "SUM":
            self._known.write(_aten.mul_.Scalar, tensor, size)
        elif reduction == "PRODUCT":
            self._known.write(_aten.pow_.Scalar, tensor, size)
        elif reduction == "BXOR" and size % 2 == 0:
            self._known.write(_aten.zero_.default, tensor)
        elif reduction not in (*_IDEMPOTENT_REDUCTIONS, "BXOR") and has_no_data(tensor):
            self._known.forget(tensor)

    def _gather_equal_values(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Set each of `parts` to `tensor`; a part with another number of elements becomes unknown."""
        if len(parts) > 1 and self._known.is_known(tensor):
            self.report_assumption("gather", f"What is gathered from {len(parts)} ranks is {_EQUAL_ON_ALL_RANKS}")
        for part in parts:
            if part.numel() == tensor.numel():
                self._copy_values(part, tensor)
            else:
                self._forget_values(part, "sizes", "gathers from ranks whose tensors have another size")
