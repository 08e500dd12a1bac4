"""Contributions of the other ranks where this rank runs alone: assumed equal to this rank's (SPMD).

Only known values are moved: values that are not known on this rank are not known on other ranks, and a tensor that
receives unknown values is no longer known. torch pickles objects into tensors of known bytes, which follow these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.limits import program_line
from memprof.virtual.peers.known import GroupRank, Known, Parts, has_no_data
from memprof.virtual.values import Values
from memprof.virtual.values.budget import is_cheap_to_compute

_aten = torch.ops.aten
_EQUAL = "taken to be equal on all ranks, as it is on this one"
_UNCHANGED = ("AVG", "MIN", "MAX", "BAND", "BOR")  # reductions of equal numbers that return the number
# Function that completes a collective when the program waits, and returns the sender of a message. None: complete.
Finish = Callable[[], object] | None


class SingleRankBackend:
    """Collectives of a rank that runs alone."""

    def __init__(self, assume: Callable[[str], None], values: Values) -> None:
        self._assume = assume
        self._values = values
        self._known = Known(values)
        self._reported_kinds: set[str] = set()
        # The last tensor that this rank sent, by shape and dtype, if it is small and known.
        self._last_sent: dict[Any, torch.Tensor] = {}

    # -- collectives of a group; `place` is the rank of this process in the group -------------------------------------

    def has(self, ranks: Sequence[int]) -> bool:
        """Return whether the program's `ranks` run."""
        return False

    def all_reduce(self, tensor: torch.Tensor, reduction: str, place: GroupRank) -> Finish:
        """Reduce `tensor` in place over ranks that are assumed to have equal tensors."""
        self._reduce(tensor, reduction, place.size)
        return None

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, place: GroupRank) -> Finish:
        """Reduce to one rank; the tensors of other ranks, which are undefined, are not changed."""
        if root == place.rank:
            self._reduce(tensor, reduction, place.size)
        return None

    def broadcast(self, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        """Broadcast from one rank, whose tensor is assumed equal to this rank's."""
        if root != place.rank and self._known.knows(tensor):
            self.say("broadcast", "What another rank broadcasts is taken to be what this one has itself")
        return None

    def all_gather(self, parts: Parts, tensor: torch.Tensor, place: GroupRank) -> Finish:
        """Set each of `parts` to the tensor of a rank, assumed equal to this rank's `tensor`."""
        if any(map(self._known.knows, (tensor, *parts.tensors))):
            self._gather(parts.each(), tensor)
        return None

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        """Gather to one rank; `parts` is None on other ranks."""
        return None if parts is None else self.all_gather(parts, tensor, place)

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, place: GroupRank) -> Finish:
        """Set `output` to this rank's part of the reduced tensors."""
        if any(map(self._known.knows, (output, *parts.tensors))):
            self._copy(output, parts.each()[place.rank])
            self._reduce(output, reduction, place.size)
        return None

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, place: GroupRank) -> Finish:
        """Scatter from one rank; `parts` is None on other ranks."""
        if parts is None:
            self._forget(output, "scatter", "is given by a scatter of another")
        else:
            self._copy(output, parts.each()[place.rank])
        return None

    def all_to_all(self, outputs: Parts, inputs: Parts, place: GroupRank) -> Finish:
        """Set each of `outputs` to the part that this rank sends to itself."""
        if any(map(self._known.knows, (*outputs.tensors, *inputs.tensors))):
            self._gather(outputs.each(), inputs.each()[place.rank])
        return None

    def barrier(self, place: GroupRank) -> Finish:
        """Wait for all ranks of the group."""
        return None

    def send(self, tensor: torch.Tensor, to: int, tag: int, place: GroupRank) -> Finish:
        """Send `tensor` to one other rank."""
        if self._known.knows(tensor) and is_cheap_to_compute(tensor):
            with torch.DisableTorchFunction(), disable_current_modes():
                known = self._values.store.get(tensor.detach())
                if known is not None:
                    self._last_sent[tensor.shape, tensor.dtype] = known.clone()
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, place: GroupRank) -> Finish:
        """Receive `tensor` from one other rank: assumed equal to the last tensor of the shape that this rank sent."""
        value = self._last_sent.get((tensor.shape, tensor.dtype))
        if value is None:
            self._forget(tensor, "receive", "receives from another")
        else:
            self.say("sent", "What this rank receives from another is taken to be what it sent last of that shape")
            self._known.write(_aten.copy_.default, tensor, value)
        return None

    # -- steps of the collectives -------------------------------------------------------------------------------------

    def say(self, kind: str, sentence: str) -> None:
        """Report an assumption, once for each `kind`, with the program's current line."""
        if kind not in self._reported_kinds:
            self._reported_kinds.add(kind)
            self._assume(f"{sentence} ({program_line()}).")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Set the values of `target` to those of `source`, in the shape of `target`."""
        if self._known.knows(target) or self._known.knows(source):
            self._known.write(_aten.copy_.default, target, source.view(target.shape))

    def _forget(self, target: torch.Tensor, kind: str, what: str) -> None:
        """Forget the values of `target`, which other ranks set; a real tensor on the host is not changed."""
        self.say(kind, f"What this rank {what} is not known, for it runs alone")
        self._known.drop(target)

    def _reduce(self, tensor: torch.Tensor, reduction: str, size: int) -> None:
        """Reduce `tensor` in place over `size` ranks that are assumed to have equal tensors."""
        if size == 1 or not self._known.knows(tensor):
            return
        self.say("reduce", f"What is reduced over {size} ranks is {_EQUAL}")
        if reduction == "SUM":
            self._known.write(_aten.mul_.Scalar, tensor, size)
        elif reduction == "PRODUCT":
            self._known.write(_aten.pow_.Scalar, tensor, size)
        elif reduction == "BXOR" and size % 2 == 0:
            self._known.write(_aten.zero_.default, tensor)
        elif reduction not in (*_UNCHANGED, "BXOR") and has_no_data(tensor):
            self._known.drop(tensor)

    def _gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Set each of `parts` to `tensor`, if the number of elements is equal, else forget the values of the part."""
        if len(parts) > 1 and self._known.knows(tensor):
            self.say("gather", f"What is gathered from {len(parts)} ranks is {_EQUAL}")
        for part in parts:
            if part.numel() == tensor.numel():
                self._copy(part, tensor)
            else:
                self._forget(part, "sizes", "gathers from ranks whose tensors have another size")
