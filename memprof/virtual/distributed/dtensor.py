"""Patches of DTensor where it asks a tensor for more than its layout: a guard of its device, or its storage's device.

And where it takes a time that is quadratic in the tensors of a list, of which an optimizer has one for each parameter:
with hundreds of them, that would be half of a run. Likewise fully_shard, which makes an empty tensor for each rank that
a parameter does not reach: of thousands of ranks that would be all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import distributed
from memprof.virtual.install_context import InstallContext


class DTensors(Extension):
    """DTensor, and what is built on it, once they are imported."""

    imports = (
        distributed.propagate_tensor_meta_non_cached.module,
        distributed.tree_map_only_of_strategies.module,
        distributed.AsyncCollectiveTensor.module,
        distributed.chunk_with_empty.module,
    )

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Replace what is asked in one of these modules."""
        of = dict(zip(self.imports, (_of_propagation, _of_strategies, _of_collectives, _of_shards), strict=True))
        yield from of[module.__name__]()


def _of_propagation() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.propagate_tensor_meta_non_cached.get(None)
    if original is None:
        return

    def propagate(propagator: Any, schema: Any) -> Any:
        # Its fake tensors are "on cuda". Written out in Python this one ends in the method copy_, which takes a guard.
        if schema.op is torch.ops.aten.uniform_.default:
            return schema.args_schema[0].tensor_meta
        if schema.op.name().startswith("aten::_foreach_") and not schema.op._schema.returns:
            return None  # in place: the original would run it on fake tensors, to the same answer
        return original(propagator, schema)

    yield distributed.propagate_tensor_meta_non_cached.patch(propagate)
    flag = distributed.propagate_use_strided_shard_flag
    if flag.exists():
        yield flag.patch(_of_strided_alone(flag.get(), distributed.StridedShard.get()))


def _of_strided_alone(flag: Callable[[Any, Any], None], strided: type) -> Callable[[Any, Any], None]:
    """`flag`, which does nothing where no argument is strided, and is requested each tensor of a list: then all
    arguments are looked at once."""
    last: list[Any] = [None, False]

    def propagate(strategy: Any, schema: Any) -> None:
        if last[0] is not schema:
            specs = schema.args_spec
            last[:] = schema, any(isinstance(placement, strided) for spec in specs for placement in spec.placements)
        if last[1]:
            flag(strategy, schema)

    return propagate


def _of_strategies() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.tree_map_only_of_strategies.get(None)
    if original is None:
        return

    def tree_map_only(kind: Any, function: Any, tree: Any, is_leaf: Any = None) -> Any:
        # Of each argument of an operator on lists, that of one tensor. Lists of tensors are leaves, and stand nowhere
        # but at the top; what else there is (hundreds of numbers) stays as it is.
        if isinstance(kind, type) and kind.__name__ == "TupleStrategy" and isinstance(tree, tuple) and len(tree) == 2:
            arguments, named = tree
            return (
                tuple(function(one) if isinstance(one, kind) else one for one in arguments),
                {name: function(one) if isinstance(one, kind) else one for name, one in named.items()},
            )
        return original(kind, function, tree, is_leaf=is_leaf)

    yield distributed.tree_map_only_of_strategies.patch(tree_map_only)


def _of_shards() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.chunk_with_empty.get(None)
    if original is None:
        return

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        # Its callers take one rank's, and the size of the first.
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        missing = num_chunks - len(chunks)
        return chunks + [chunks[0].new_empty(0)] * missing if missing else chunks

    yield distributed.chunk_with_empty.patch(chunk_with_empty)


def _of_collectives() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.new_async_collective_tensor.get()

    def make(*args: Any) -> Any:
        # A view of one in a DTensor gets the storage of what is in it, which C++ compares by the device: both on meta.
        with torch.DisableTorchFunction():
            return original(*args)

    yield distributed.new_async_collective_tensor.patch(staticmethod(make))
