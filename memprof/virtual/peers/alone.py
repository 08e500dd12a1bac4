"""Contributions of the other ranks where this one runs alone: they are taken to be like it (SPMD).

Only known values are ever moved: what is not known on this rank is not known of the others either, and a tensor that
takes it is no longer known. Objects are pickled into tensors of known bytes by torch itself: this holds for them too.
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
_UNCHANGED = ("AVG", "MIN", "MAX", "BAND", "BOR")  # reductions that give equal numbers back
# Called when the program waits for what it requested, which is there then; of a message gives the sender. None: it is
# there already.
Finish = Callable[[], object] | None


class SingleRankBackend:
    """A rank without others."""

    def __init__(self, assume: Callable[[str], None], values: Values) -> None:
        self._assume = assume
        self._values = values
        self._known = Known(values)
        self._said: set[str] = set()
        # What this rank sent last, by shape and dtype, where that is little and known.
        self._sent: dict[Any, torch.Tensor] = {}

    # -- what a group asks for; `place` is this rank's in it ----------------------------------------------------------

    def has(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks of the program are there."""
        return False

    def all_reduce(self, tensor: torch.Tensor, reduction: str, place: GroupRank) -> Finish:
        """Reduce in place, over ranks that have it alike."""
        self._reduce(tensor, reduction, place.size)
        return None

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, place: GroupRank) -> Finish:
        """Reduce to one rank; what the others have then is not said, and stays."""
        if root == place.rank:
            self._reduce(tensor, reduction, place.size)
        return None

    def broadcast(self, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        """Broadcast from one rank, whose tensor is like this one's."""
        if root != place.rank and self._known.knows(tensor):
            self.say("broadcast", "What another rank broadcasts is taken to be what this one has itself")
        return None

    def all_gather(self, parts: Parts, tensor: torch.Tensor, place: GroupRank) -> Finish:
        """Give each part what a rank gives."""
        if any(map(self._known.knows, (tensor, *parts.tensors))):
            self._gather(parts.each(), tensor)
        return None

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        """Gather to one rank: the others have no parts."""
        return None if parts is None else self.all_gather(parts, tensor, place)

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, place: GroupRank) -> Finish:
        """Return this rank's part of each tensor, reduced."""
        if any(map(self._known.knows, (output, *parts.tensors))):
            self._copy(output, parts.each()[place.rank])
            self._reduce(output, reduction, place.size)
        return None

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, place: GroupRank) -> Finish:
        """Scatter from one rank: the others have no parts."""
        if parts is None:
            self._forget(output, "scatter", "is given by a scatter of another")
        else:
            self._copy(output, parts.each()[place.rank])
        return None

    def all_to_all(self, outputs: Parts, inputs: Parts, place: GroupRank) -> Finish:
        """Return what each sends this rank: what this one sends itself."""
        if any(map(self._known.knows, (*outputs.tensors, *inputs.tensors))):
            self._gather(outputs.each(), inputs.each()[place.rank])
        return None

    def barrier(self, place: GroupRank) -> Finish:
        """Wait until all have come."""
        return None

    def send(self, tensor: torch.Tensor, to: int, tag: int, place: GroupRank) -> Finish:
        """`tensor` goes to one other rank."""
        if self._known.knows(tensor) and is_cheap_to_compute(tensor):
            with torch.DisableTorchFunction(), disable_current_modes():
                known = self._values.store.get(tensor.detach())
                if known is not None:
                    self._sent[tensor.shape, tensor.dtype] = known.clone()
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, place: GroupRank) -> Finish:
        """`tensor` is sent by one other rank: it is what this one has sent, as a vote that goes round."""
        sent = self._sent.get((tensor.shape, tensor.dtype))
        if sent is None:
            self._forget(tensor, "receive", "receives from another")
        else:
            self.say("sent", "What this rank receives from another is taken to be what it sent last of that shape")
            self._known.write(_aten.copy_.default, tensor, sent)
        return None

    # -- the same in steps --------------------------------------------------------------------------------------------

    def say(self, kind: str, sentence: str) -> None:
        """An assumption, of each kind once, with the line of the program that rests on it first."""
        if kind not in self._said:
            self._said.add(kind)
            self._assume(f"{sentence} ({program_line()}).")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target` holds from now on what `source` does, spread over its shape."""
        if self._known.knows(target) or self._known.knows(source):
            self._known.write(_aten.copy_.default, target, source.view(target.shape))

    def _forget(self, target: torch.Tensor, kind: str, what: str) -> None:
        """`target` takes `what` of other ranks; a tensor that really is on the host stays as it is."""
        self.say(kind, f"What this rank {what} is not known, for it runs alone")
        self._known.drop(target)

    def _reduce(self, tensor: torch.Tensor, reduction: str, size: int) -> None:
        """`tensor` is reduced in place over so many ranks that have it alike."""
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
        """Each of `parts` takes what a rank gives, of whatever shape this one does."""
        if len(parts) > 1 and self._known.knows(tensor):
            self.say("gather", f"What is gathered from {len(parts)} ranks is {_EQUAL}")
        for part in parts:
            if part.numel() == tensor.numel():
                self._copy(part, tensor)
            else:
                self._forget(part, "sizes", "gathers from ranks whose tensors have another size")
