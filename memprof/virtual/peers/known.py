"""Known values of the tensors that ranks give each other, read and written behind the program's back.

No operator of the program runs for it, and autograd does not see it, as with what NCCL writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.values import Values
from memprof.virtual.values.budget import is_cheap_to_compute


class GroupRank(NamedTuple):
    """The place of this rank in a group."""

    name: str
    ranks: tuple[int, ...]  # of the program, in the group's order
    rank: int  # this one's number in the group

    @property
    def size(self) -> int:
        """Return the number of ranks in it."""
        return len(self.ranks)


class Parts:
    """The tensors that a rank gives each rank of a group, or takes: one each, or pieces of one, not cut
    before somebody looks at them.

    Args:
        tensors: one for each rank; or, with `pieces`, one alone.
        pieces: so many, along the first dimension.
        splits: lengths of these, if they are not alike.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pieces: int = 0, splits: Sequence[int] = ()) -> None:
        self.tensors = tensors
        self._pieces = pieces
        self._splits = splits

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each part."""
        if not self._pieces:
            return tuple(tensor.numel() for tensor in self.tensors)
        whole = self.tensors[0].numel()
        if not self._splits:
            return (whole // self._pieces,) * self._pieces
        rows = self.tensors[0].shape[0] or 1
        return tuple(whole // rows * length for length in self._splits)

    def each(self) -> Sequence[torch.Tensor]:
        """Return the parts."""
        if not self._pieces:
            return self.tensors
        return self.tensors[0].split(list(self._splits)) if self._splits else self.tensors[0].chunk(self._pieces)


class Known:
    """Access to what is known of them."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether something is known of what `tensor` holds."""
        return not has_no_data(tensor) or self._values.store.knows(tensor.untyped_storage()._cdata)

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what it holds, in memory that is not to be written to; None if unknown, or too much to tell."""
        if not self.knows(tensor):
            return None
        with torch.DisableTorchFunction(), disable_current_modes():
            tensor = tensor.detach()
            if not tensor.is_meta or is_cheap_to_compute(tensor) or self._values.store.is_uniform(tensor):
                return self._values.store.get(tensor)
        return None

    def write(self, function: Any, target: torch.Tensor, *arguments: Any) -> None:
        """Run an operator in place on what `target` holds."""
        with torch.no_grad(), torch.DisableTorchFunction(), disable_current_modes():
            if target.is_meta:
                self._values.write(function, (target, *arguments), {}, target)
            else:
                function(target.data, *arguments)

    def put(self, target: torch.Tensor, held: torch.Tensor | None) -> None:
        """Have `target` hold what `held` does, spread over its shape. None: that is not known, and a tensor that really
        is on the host stays as it is."""
        if held is None:
            self.drop(target)
        else:
            with torch.DisableTorchFunction(), disable_current_modes():
                held = held.reshape(target.shape)
            self.write(torch.ops.aten.copy_.default, target, held)

    def drop(self, target: torch.Tensor) -> None:
        """Forget what `target` holds."""
        if has_no_data(target):
            self._values.store.drop(target.untyped_storage()._cdata)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return what the tensor is, not what the program is told of it."""
    with torch.DisableTorchFunction():
        return tensor.is_meta
