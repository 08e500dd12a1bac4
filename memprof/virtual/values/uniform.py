"""Operators on tensors whose elements are all alike: what they make is such a tensor, too."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.calls import tensors_of
from memprof.virtual.values import unknowns
from memprof.virtual.values.budget import is_integer, is_small
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten


def fill(store: ValueStore, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    """Note the one value of what `func`, one of `unknowns.UNIFORM` (`zeros`, `full`, ...), fills."""
    packet = func.overloadpacket
    value = unknowns.UNIFORM[packet](args, kwargs)
    value = store.get(value) if isinstance(value, torch.Tensor) else value
    for output in outputs:
        if value is not None and (packet not in unknowns.EMPTY or is_small(output) or is_integer(output)):
            store.set_uniform(output, value)


def follow(store: ValueStore, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    """Note the one value of the output of `func`, where it works on single elements of tensors that are alike; returns
    whether it does."""
    packet = func.overloadpacket
    if len(outputs) != 1 or not args or not isinstance(args[0], torch.Tensor) or is_small(args[0]):
        return False
    first = store.uniform_value(args[0])
    if first is None:
        return False
    if packet is _aten.sum or packet is _aten.count_nonzero:
        if first.is_floating_point() or not outputs[0].numel():
            return False
        times = args[0].numel() // outputs[0].numel()
        store.set_uniform(outputs[0], (first != 0 if packet is _aten.count_nonzero else first) * times)
        return True
    if packet is _aten._to_copy or packet in unknowns.ANY_ELEMENT:
        store.set_uniform(outputs[0], first)
        return True
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    ones = [store.uniform_value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if any(one is None and arg is not None for one, arg in zip(ones, args, strict=True)):
        return False
    if tensors_of(list(kwargs.values())) or any(isinstance(arg, (list, tuple)) for arg in args):
        return False
    try:
        store.set_uniform(outputs[0], func(*ones, **{k: v for k, v in kwargs.items() if k != "memory_format"}))
    except (RuntimeError, IndexError, NotImplementedError):
        return False
    return True
