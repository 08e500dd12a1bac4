"""Known values of the tensors in collectives, read and written without an operator of the program.

Autograd does not see the writes, as it does not see NCCL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.values import Values
from memprof.virtual.values.budget import is_cheap_to_compute


class GroupRank(NamedTuple):
    """Rank of this process in a group."""

    name: str
    ranks: tuple[int, ...]  # of the program, in the group's order
    rank: int  # rank of this process in the group

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)


class Parts:
    """Tensors that a rank sends to, or receives from, each rank of a group: a list, or one tensor that is split when
    the parts are read.

    Args:
        tensors: one tensor for each rank; or, with `pieces`, a single tensor.
        pieces: number of parts of the single tensor along the first dimension.
        splits: lengths of the parts, if they differ.
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
        """Return the tensor of each rank."""
        if not self._pieces:
            return self.tensors
        return self.tensors[0].split(list(self._splits)) if self._splits else self.tensors[0].chunk(self._pieces)


class Known:
    """Access to the known values of tensors in collectives."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether values of `tensor` are known."""
        return not has_no_data(tensor) or self._values.store.knows(tensor.untyped_storage()._cdata)

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of `tensor`, read-only; None if they are not known, or too large to send."""
        if not self.knows(tensor):
            return None
        with torch.DisableTorchFunction(), disable_current_modes():
            tensor = tensor.detach()
            if not tensor.is_meta or is_cheap_to_compute(tensor) or self._values.store.is_uniform(tensor):
                return self._values.store.get(tensor)
        return None

    def write(self, function: Any, target: torch.Tensor, *arguments: Any) -> None:
        """Run the in-place operator `function` on the values of `target`."""
        with torch.no_grad(), torch.DisableTorchFunction(), disable_current_modes():
            if target.is_meta:
                self._values.write(function, (target, *arguments), {}, target)
            else:
                function(target.data, *arguments)

    def put(self, target: torch.Tensor, held: torch.Tensor | None) -> None:
        """Set the values of `target` to `held`, in the shape of `target`. None: the values are not known, and a real
        tensor on the host is not changed."""
        if held is None:
            self.drop(target)
        else:
            with torch.DisableTorchFunction(), disable_current_modes():
                held = held.reshape(target.shape)
            self.write(torch.ops.aten.copy_.default, target, held)

    def drop(self, target: torch.Tensor) -> None:
        """Forget the values of `target`."""
        if has_no_data(target):
            self._values.store.drop(target.untyped_storage()._cdata)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a meta tensor, whatever device the program sees."""
    with torch.DisableTorchFunction():
        return tensor.is_meta
