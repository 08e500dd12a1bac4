"""Chosen tokens: numbers that stand for tokens which unknown scores have chosen.

Such a number is a stand-in for many. It is followed through integers made of it, so that a comparison with a token that
the program names (the end of a text, padding) finds it unlike.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.calls import tensors_of
from memprof.virtual.values import unknowns

_aten = torch.ops.aten

_NAMES = frozenset({_aten.eq, _aten.ne, _aten.isin, _aten.equal})
"""Operators by which a program asks whether a token is one that it names."""


class ChosenTokens:
    """The numbers that stand for chosen tokens in the tensors of a run, by the address of their storage."""

    def __init__(self) -> None:
        self._numbers: dict[int, range] = {}

    def drop(self, address: int) -> None:
        """The storage at `address` died, or holds something else."""
        self._numbers.pop(address, None)

    def among(self, value: Any) -> range:
        """The numbers in `value`, one tensor or several, that stand for chosen tokens; none for most."""
        if not self._numbers:
            return range(0)
        found = [self._numbers.get(t.untyped_storage()._cdata) for t in tensors_of(value) if t.is_meta]
        ranges = [numbers for numbers in found if numbers]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def mark(self, tensor: torch.Tensor, numbers: range) -> None:
        """Say that `numbers` stand for chosen tokens in `tensor`."""
        if numbers:
            self._numbers[tensor.untyped_storage()._cdata] = numbers

    def hand_on(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Integers made of chosen tokens have such among them."""
        if not self._numbers:
            return
        given = args[1:] if func.overloadpacket in unknowns.UNIFORM else args
        numbers = self.among([*given, *kwargs.values()])
        for tensor in made:
            if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
                self.mark(tensor, numbers)

    def compared(self, func: Any, args: Any, known: Any, result: Any) -> Any:
        """`result` of `func`, but that a chosen token is equal to none that the program names.

        Args:
            func: an operator's overload.
            args: its arguments.
            known: the same with known values in place of tensors.
            result: what it gave of those.
        """
        if not self._numbers or func.overloadpacket not in _NAMES:
            return result
        left, right = (self.among([arg]) for arg in args[:2])
        if bool(left) == bool(right):
            return result
        number, chosen = torch.as_tensor(known[0]), left or right
        unknown = (number >= chosen.start) & (number < chosen.stop)
        return result | unknown if func.overloadpacket is _aten.ne else result & ~unknown
