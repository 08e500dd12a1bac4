"""Known values of the tensors in collectives, read and written without autograd, as NCCL does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.values import Values
from memprof.virtual.values.budget import is_cheap_to_compute


class GroupRank(NamedTuple):
    """A process group, and the rank of this process in it."""

    name: str
    ranks: tuple[int, ...]  # of the program, in the group's order
    rank: int  # rank of this process in the group

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)


class Parts:
    """Tensors that a rank sends to, or receives from, each rank of a group: one per rank, or one tensor to split.

    Args:
        tensors: one tensor for each rank; or, with `num_parts`, a single tensor.
        num_parts: number of parts of the single tensor along the first dimension.
        lengths: lengths of the parts along the first dimension, if the lengths differ.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_parts: int = 0, lengths: Sequence[int] = ()) -> None:
        self.tensors = tensors
        self._num_parts = num_parts
        self._lengths = lengths

    @property
    def element_counts(self) -> tuple[int, ...]:
        """Return the number of elements of each part."""
        if not self._num_parts:
            return tuple(tensor.numel() for tensor in self.tensors)
        num_elements = self.tensors[0].numel()
        if not self._lengths:
            return (num_elements // self._num_parts,) * self._num_parts
        rows = self.tensors[0].shape[0] or 1
        return tuple(num_elements // rows * length for length in self._lengths)

    def split(self) -> Sequence[torch.Tensor]:
        """Return the tensor of each rank."""
        if not self._num_parts:
            return self.tensors
        return self.tensors[0].split(list(self._lengths)) if self._lengths else self.tensors[0].chunk(self._num_parts)


class KnownValues:
    """Element values of tensors in collectives, read and written where the simulation has computed them."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether values of `tensor`, or of its storage, are known."""
        return not has_no_data(tensor) or self._values.store.is_known(tensor.untyped_storage()._cdata)

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of `tensor`, not to be modified; None if they are not known, or too large to send."""
        if not self.is_known(tensor):
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

    def set(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        """Set the values of `target` to `value`, reshaped; None makes the values of a meta tensor unknown."""
        if value is None:
            self.forget(target)
        else:
            with torch.DisableTorchFunction(), disable_current_modes():
                value = value.reshape(target.shape)
            self.write(torch.ops.aten.copy_.default, target, value)

    def forget(self, target: torch.Tensor) -> None:
        """Make the values of `target` unknown if it is a meta tensor."""
        if has_no_data(target):
            self._values.store.drop(target.untyped_storage()._cdata)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a meta tensor, regardless of the device that the program sees."""
    with torch.DisableTorchFunction():
        return tensor.is_meta
