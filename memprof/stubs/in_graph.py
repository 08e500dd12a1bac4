"""Stubs in compiled code: each is one operator of a graph, as the real packages register their operators.

Dynamo puts the call of a library's function into its graph unchanged, if the function requests it. AOTAutograd then
runs the function to trace its operators, which for a stub only allocate. So, while a graph is traced, the stub's kernel
is hidden behind one operator, `memprof_stubs::call`, which Inductor treats as an external kernel; when the compiled
code runs, the operator allocates as an eager call does, scratch memory included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from memprof.patching import Patch
from memprof.torch_private import dynamo
from memprof.torch_private.pytree import tree_flatten, tree_unflatten

_NAME = "memprof_stubs::call"


class _TensorSource(NamedTuple):
    """The source of a tensor in a result: an argument, or an output of the operator."""

    is_input: bool
    position: int  # among the arguments' or the outputs' tensors
    view: tuple[Any, Any, int] | None  # sizes, strides and offset in the source tensor; None: the source tensor itself


class _GraphCall:
    """One call in a graph: the function, its arguments other than tensors, and the structure of its result.

    Tensors in the function's closure are arguments too, since a later call of the graph has other tensors there.
    """

    def __init__(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        self._function = function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        leaves, self._spec = tree_flatten((cells, args))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensor_indices = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._result_spec: Any = None
        self._result_leaves: list[Any] = []

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function on `tensors`; return its result's new tensors, each storage once (no aliases)."""
        leaves = list(self._leaves)
        for at, tensor in zip(self._tensor_indices, tensors, strict=True):
            leaves[at] = tensor
        cells, args = tree_unflatten(leaves, self._spec)
        function = FunctionType(
            self._function.__code__, self._function.__globals__, closure=tuple(CellType(value) for value in cells)
        )
        leaves, self._result_spec = tree_flatten(function(*args))
        inputs = {_storage_key(tensor): tensor for tensor in reversed(tensors)}
        outputs: dict[int, torch.Tensor] = {}  # the largest new tensor of each storage
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (key := _storage_key(leaf)) not in inputs:
                outputs[key] = max(outputs.get(key, leaf), leaf, key=torch.Tensor.numel)
        new = list(outputs.values())

        def find_source(leaf: torch.Tensor) -> _TensorSource:
            is_input = (key := _storage_key(leaf)) in inputs
            sources = tensors if is_input else new
            for index, source in enumerate(sources):
                if source is leaf:
                    return _TensorSource(is_input, index, None)
            base = inputs[key] if is_input else outputs[key]
            index = next(index for index, source in enumerate(sources) if source is base)
            view = (tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))
            return _TensorSource(is_input, index, view)

        self._result_leaves = [find_source(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return new

    def assemble_result(self, outputs: list[torch.Tensor]) -> Any:
        """Return the function's result, assembled from the operator's outputs."""

        def get_leaf(source: Any) -> Any:
            if not isinstance(source, _TensorSource):
                return source
            tensor = (self.tensors if source.is_input else outputs)[source.position]
            return tensor if source.view is None else torch.as_strided(tensor, *source.view)

        return tree_unflatten([get_leaf(source) for source in self._result_leaves], self._result_spec)


_calls: list[_GraphCall] = []  # by the number that the graph passes to the operator
_functions: list[Any] = []  # functions that are one operator of a graph
_operator: Any = None


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether any of the values is being traced into a graph."""
    if not dynamo.FunctionalTensor.is_imported():
        return False
    functional = dynamo.FunctionalTensor.get()
    return any(isinstance(value, functional) for value in values)


def call_in_graph(function: Any, *args: Any) -> Any:
    """Call `function`, which makes new tensors and writes into none, as one operator of the graph that is traced."""
    call = _GraphCall(function, args)
    _calls.append(call)
    return call.assemble_result(_get_operator()(len(_calls) - 1, call.tensors))


def _get_operator() -> Any:
    global _operator
    if _operator is None:

        def run(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return _calls[call].run(tensors)

        schema = "(int call, Tensor[] tensors) -> Tensor[]"
        _operator = torch.library.custom_op(_NAME, run, mutates_args=(), schema=schema)
        _operator.register_fake(run)
    return _operator


def clear_calls() -> None:
    """Discard the calls of this run's graphs, which are not run any more."""
    _calls.clear()


def allow(function: Any) -> None:
    """Register `function` as one operator of a graph."""
    _functions.append(function)
    if dynamo.allow_in_graph.is_imported():
        torch.compiler.allow_in_graph(function)


def register_with_dynamo() -> Iterator[Patch]:
    """Register the functions of `allow` with dynamo, once dynamo is imported; no patch is yielded."""
    for function in _functions:
        torch.compiler.allow_in_graph(function)
    yield from ()
