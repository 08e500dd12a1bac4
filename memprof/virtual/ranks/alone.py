"""What the other ranks contribute where this one runs alone: they are taken to be like it (SPMD).

Only known values are ever moved: what is not known on this rank is not known of the others either, and a tensor that
takes it is no longer known. Objects are pickled into tensors of known bytes by torch itself: this holds for them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memprof.virtual.limits import program_line
from memprof.virtual.values import Values, is_small

_aten = torch.ops.aten
_EQUAL = "taken to be equal on all ranks, as it is on this one"
_UNCHANGED = ("AVG", "MIN", "MAX", "BAND", "BOR")
"""Reductions that give equal numbers back."""


class Alone:
    """A rank without others.

    Args:
        assume: told what the run rests on.
        values: what is known of tensors.
    """

    def __init__(self, assume: Callable[[str], None], values: Values) -> None:
        self._assume = assume
        self._values = values
        self._said: set[str] = set()
        self._sent: dict[Any, torch.Tensor] = {}
        """What this rank sent last, by shape and dtype, where that is little and known."""

    def say(self, kind: str, sentence: str) -> None:
        """An assumption, of each kind once, with the line of the program that rests on it first."""
        if kind not in self._said:
            self._said.add(kind)
            self._assume(f"{sentence} ({program_line()}).")

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether something is known of what `tensor` holds."""
        return not _has_no_data(tensor) or self._values.knows(tensor.untyped_storage()._cdata)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target` holds from now on what `source` does, spread over its shape.

        No operator of the program runs for it, and autograd does not see it, as with what NCCL writes.
        """
        if self.knows(target) or self.knows(source):
            self._write(_aten.copy_.default, target, source)

    def forget(self, target: torch.Tensor, kind: str, what: str) -> None:
        """`target` takes `what` of other ranks; a tensor that really is on the host stays as it is."""
        self.say(kind, f"What this rank {what} is not known, for it runs alone")
        if _has_no_data(target):
            self._values.drop(target.untyped_storage()._cdata)

    def send(self, tensor: torch.Tensor) -> None:
        """`tensor` goes to one other rank."""
        if self.knows(tensor) and is_small(tensor):
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                known = self._values.get(tensor.detach())
                if known is not None:
                    self._sent[tensor.shape, tensor.dtype] = known.clone()

    def receive(self, tensor: torch.Tensor) -> None:
        """`tensor` is sent by one other rank: it is what this one has sent, as a vote that goes round."""
        sent = self._sent.get((tensor.shape, tensor.dtype))
        if sent is None:
            self.forget(tensor, "receive", "receives from another")
        else:
            self.say("sent", "What this rank receives from another is taken to be what it sent last of that shape")
            self._write(_aten.copy_.default, tensor, sent)

    def reduce(self, tensor: torch.Tensor, reduction: str, size: int) -> None:
        """`tensor` is reduced in place over so many ranks that have it alike."""
        if size == 1 or not self.knows(tensor):
            return
        self.say("reduce", f"What is reduced over {size} ranks is {_EQUAL}")
        if reduction == "SUM":
            self._write(_aten.mul_.Scalar, tensor, size)
        elif reduction == "PRODUCT":
            self._write(_aten.pow_.Scalar, tensor, size)
        elif reduction == "BXOR" and size % 2 == 0:
            self._write(_aten.zero_.default, tensor)
        elif reduction not in (*_UNCHANGED, "BXOR") and _has_no_data(tensor):
            self._values.drop(tensor.untyped_storage()._cdata)

    def gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Each of `parts` takes what a rank gives, of whatever shape this one does."""
        if len(parts) > 1 and self.knows(tensor):
            self.say("gather", f"What is gathered from {len(parts)} ranks is {_EQUAL}")
        for part in parts:
            if part.shape == tensor.shape:
                self.copy(part, tensor)
            elif part.numel() == tensor.numel():
                self.copy(part, tensor.view(part.shape))
            else:
                self.forget(part, "sizes", "gathers from ranks whose tensors have another size")

    def _write(self, function: Any, target: torch.Tensor, *arguments: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            if target.is_meta:
                self._values.write(function, (target, *arguments), {}, target)
            else:
                function(target.data, *arguments)


def _has_no_data(tensor: torch.Tensor) -> bool:
    """What the tensor is, not what the program is told of it."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta
