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

_OPERATOR_NAME = "memprof_stubs::call"


class _TensorSource(NamedTuple):
    """Where a tensor of a function's result comes from: an argument or an output of the graph's operator."""

    is_input: bool
    position: int  # among the arguments' or the outputs' tensors
    view: tuple[Any, Any, int] | None  # sizes, strides and offset in the source tensor; None: the source tensor itself


class _GraphCall:
    """A call of a stub in a graph: the function, its arguments other than tensors, and the structure of its result.

    Tensors in the function's closure count as arguments, since they differ in later calls of the graph.
    """

    def __init__(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        self._function = function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        leaves, self._spec = tree_flatten((cells, args))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._result_spec: Any = None
        self._result_leaves: list[Any] = []

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function on `tensors`; return the new tensors of its result, one for each storage."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._tensor_indices, tensors, strict=True):
            leaves[i] = tensor
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
        new_tensors = list(outputs.values())

        def find_source(leaf: torch.Tensor) -> _TensorSource:
            is_input = (key := _storage_key(leaf)) in inputs
            sources = tensors if is_input else new_tensors
            for index, source in enumerate(sources):
                if source is leaf:
                    return _TensorSource(is_input, index, None)
            base = inputs[key] if is_input else outputs[key]
            index = next(index for index, source in enumerate(sources) if source is base)
            view = (tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))
            return _TensorSource(is_input, index, view)

        self._result_leaves = [find_source(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return new_tensors

    def assemble_result(self, outputs: list[torch.Tensor]) -> Any:
        """Return the function's result, built from the operator's `outputs`, the arguments, and views of both."""

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
    """Return whether AOTAutograd is tracing any of `values`, a FunctionalTensor, into a graph."""
    if not dynamo.FunctionalTensor.is_imported():
        return False
    functional = dynamo.FunctionalTensor.get()
    return any(isinstance(value, functional) for value in values)


def call_in_graph(function: Any, *args: Any) -> Any:
    """Call `function`, which writes to no argument, as one operator of the graph that is being traced."""
    call = _GraphCall(function, args)
    _calls.append(call)
    return call.assemble_result(_get_operator()(len(_calls) - 1, call.tensors))


def _get_operator() -> Any:
    global _operator
    if _operator is None:

        def run(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return _calls[call].run(tensors)

        schema = "(int call, Tensor[] tensors) -> Tensor[]"
        _operator = torch.library.custom_op(_OPERATOR_NAME, run, mutates_args=(), schema=schema)
        _operator.register_fake(run)
    return _operator


def clear_calls() -> None:
    """Discard the recorded calls, after the last run of this run's graphs."""
    _calls.clear()


def allow_in_graph(function: Any) -> None:
    """Let dynamo keep calls of `function` in its graphs, as torch.compiler.allow_in_graph does."""
    _functions.append(function)
    if dynamo.allow_in_graph.is_imported():
        torch.compiler.allow_in_graph(function)


def register_with_dynamo() -> Iterator[Patch]:
    """Register with dynamo the functions that were allowed before it was imported; yield no patch."""
    for function in _functions:
        torch.compiler.allow_in_graph(function)
    yield from ()
