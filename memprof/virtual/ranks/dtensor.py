"""Where DTensor asks for more of a tensor than its layout: for a guard of its device, or for its storage's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def patches() -> dict[str, Callable[[Any], Iterator[tuple[Any, str, Any]]]]:
    """By module, the patches (owner, name, replacement) once it is imported."""
    return {
        "torch.distributed.tensor._sharding_prop": _of_propagation,
        "torch.distributed._functional_collectives": _of_collectives,
    }


def _of_propagation(module: Any) -> Iterator[tuple[Any, str, Any]]:
    owner, name = module.ShardingPropagator, "_propagate_tensor_meta_non_cached"
    original = getattr(owner, name, None)
    if original is None:
        return

    def propagate(propagator: Any, schema: Any) -> Any:
        # Its fake tensors are "on cuda". Written out in Python this one ends in the method copy_, which takes a guard.
        if schema.op is torch.ops.aten.uniform_.default:
            return schema.args_schema[0].tensor_meta
        return original(propagator, schema)

    yield owner, name, propagate


def _of_collectives(module: Any) -> Iterator[tuple[Any, str, Any]]:
    owner = module.AsyncCollectiveTensor
    original = owner.__new__

    def make(*args: Any) -> Any:
        # A view of one in a DTensor gets the storage of what is in it, which C++ compares by the device: both on meta.
        with torch._C.DisableTorchFunction():
            return original(*args)

    yield owner, "__new__", staticmethod(make)
