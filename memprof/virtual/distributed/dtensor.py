"""Patches of DTensor's functions that read a tensor's device, or that are slow with many tensors or ranks.

For operators on lists of tensors, DTensor's time is quadratic in the number of tensors: with hundreds of parameters,
an optimizer takes half of a run. fully_shard creates an empty tensor for each rank without a part of a parameter: with
thousands of ranks, nearly all of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import distributed
from memprof.virtual.install_context import InstallContext


class DTensorPatches(Extension):
    """Patches of DTensor and of fully_shard, once the modules are imported."""

    imports = (
        distributed.propagate_tensor_meta_non_cached.module,
        distributed.tree_map_only_of_strategies.module,
        distributed.AsyncCollectiveTensor.module,
        distributed.chunk_with_empty.module,
    )

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield the patches of one of the modules in `imports`."""
        functions = _patch_propagation, _patch_strategies, _patch_collectives, _patch_chunks
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
    shard_flag = distributed.propagate_use_strided_shard_flag
    if shard_flag.exists():
        yield shard_flag.patch(_wrap_set_flag(shard_flag.get(), distributed.StridedShard.get()))


def _wrap_set_flag(set_flag: Callable[[Any, Any], None], strided: type) -> Callable[[Any, Any], None]:
    """Return a faster `set_flag`, which looks for placements of `strided` once per call of an operator, not once per
    tensor of a list. Without such placements `set_flag` has no effect."""
    cache: list[Any] = [None, False]

    def set_flag_if_strided(strategy: Any, schema: Any) -> None:
        if cache[0] is not schema:
            specs = schema.args_spec
            cache[:] = schema, any(isinstance(placement, strided) for spec in specs for placement in spec.placements)
        if cache[1]:
            set_flag(strategy, schema)

    return set_flag_if_strided


def _patch_strategies() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.tree_map_only_of_strategies.get(None)
    if original is None:
        return

    def tree_map_only(cls: Any, function: Any, tree: Any, is_leaf: Any = None) -> Any:
        # `function` replaces lists of tensors, which occur only as arguments; other arguments (hundreds of numbers) are
        # not traversed.
        if isinstance(cls, type) and cls.__name__ == "TupleStrategy" and isinstance(tree, tuple) and len(tree) == 2:
            args, kwargs = tree
            return (
                tuple(function(argument) if isinstance(argument, cls) else argument for argument in args),
                {name: function(value) if isinstance(value, cls) else value for name, value in kwargs.items()},
            )
        return original(cls, function, tree, is_leaf=is_leaf)

    yield distributed.tree_map_only_of_strategies.patch(tree_map_only)


def _patch_chunks() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.chunk_with_empty.get(None)
    if original is None:
        return

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        # Callers use the chunk of one rank, and the size of the first chunk.
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        num_missing = num_chunks - len(chunks)
        return chunks + [chunks[0].new_empty(0)] * num_missing if num_missing else chunks

    yield distributed.chunk_with_empty.patch(chunk_with_empty)


def _patch_collectives() -> Iterator[tuple[Any, str, Any]]:
    original = distributed.new_async_collective_tensor.get()

    def make_tensor(*args: Any) -> Any:
        # C++ compares the devices of the tensor and of its storage, which a view in a DTensor shares: both are meta.
        with torch.DisableTorchFunction():
            return original(*args)

    yield distributed.new_async_collective_tensor.patch(staticmethod(make_tensor))
