"""Patches of DTensor where DTensor needs the device of a tensor or storage, and where it is slow.

For operators on lists, DTensor takes a time that is quadratic in the number of tensors: half of a run for an optimizer
with hundreds of parameters. fully_shard makes an empty tensor for each rank without a part of a parameter: nearly all
of the time of a run with thousands of ranks.
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
    """Patches of DTensor and of fully_shard, once the modules are imported."""

    imports = (
        distributed.propagate_tensor_meta_non_cached.module,
        distributed.tree_map_only_of_strategies.module,
        distributed.AsyncCollectiveTensor.module,
        distributed.chunk_with_empty.module,
    )

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield the patches of one of the modules in `imports`."""
        functions = _patch_propagation, _patch_strategies, _patch_collectives, _patch_shards
        yield from dict(zip(self.imports, functions, strict=True))[module.__name__]()


def _patch_propagation() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.propagate_tensor_meta_non_cached.get(None)
    if original is None:
        return

    def propagate(propagator: Any, schema: Any) -> Any:
        # DTensor's fake tensors are "on cuda"; uniform_ decomposes into copy_, which needs a device guard.
        if schema.op is torch.ops.aten.uniform_.default:
            return schema.args_schema[0].tensor_meta
        if schema.op.name().startswith("aten::_foreach_") and not schema.op._schema.returns:
            return None  # in place: the original runs the operator on fake tensors and also returns None
        return original(propagator, schema)

    yield distributed.propagate_tensor_meta_non_cached.patch(propagate)
    flag = distributed.propagate_use_strided_shard_flag
    if flag.exists():
        yield flag.patch(_skip_without_strided(flag.get(), distributed.StridedShard.get()))


def _skip_without_strided(flag: Callable[[Any, Any], None], strided: type) -> Callable[[Any, Any], None]:
    """Return `flag`, which has no effect without strided placements, as a function that looks for strided placements
    once per call of an operator and not once per tensor of a list."""
    last: list[Any] = [None, False]

    def propagate(strategy: Any, schema: Any) -> None:
        if last[0] is not schema:
            specs = schema.args_spec
            last[:] = schema, any(isinstance(placement, strided) for spec in specs for placement in spec.placements)
        if last[1]:
            flag(strategy, schema)

    return propagate


def _patch_strategies() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.tree_map_only_of_strategies.get(None)
    if original is None:
        return

    def tree_map_only(kind: Any, function: Any, tree: Any, is_leaf: Any = None) -> Any:
        # `function` replaces lists of tensors, which occur only as arguments; other arguments (hundreds of numbers) are
        # not traversed.
        if isinstance(kind, type) and kind.__name__ == "TupleStrategy" and isinstance(tree, tuple) and len(tree) == 2:
            arguments, named = tree
            return (
                tuple(function(argument) if isinstance(argument, kind) else argument for argument in arguments),
                {name: function(value) if isinstance(value, kind) else value for name, value in named.items()},
            )
        return original(kind, function, tree, is_leaf=is_leaf)

    yield distributed.tree_map_only_of_strategies.patch(tree_map_only)


def _patch_shards() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.chunk_with_empty.get(None)
    if original is None:
        return

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        # Callers use the chunk of one rank, and the size of the first chunk.
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        missing = num_chunks - len(chunks)
        return chunks + [chunks[0].new_empty(0)] * missing if missing else chunks

    yield distributed.chunk_with_empty.patch(chunk_with_empty)


def _patch_collectives() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.new_async_collective_tensor.get()

    def make(*args: Any) -> Any:
        # A view of the tensor in a DTensor shares the storage, whose device C++ compares: both have to be on meta.
        with torch.DisableTorchFunction():
            return original(*args)

    yield distributed.new_async_collective_tensor.patch(staticmethod(make))
