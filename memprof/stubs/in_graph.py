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

    given: bool
    number: int
    view: tuple[Any, Any, int] | None  # its sizes, strides and offset in the source tensor; None: the whole tensor


class _GraphCall:
    """One call in a graph: the function, its arguments other than tensors, and the structure of its result.

    Tensors in the function's closure are arguments too, since a later call of the graph has other tensors there.
    """

    def __init__(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        self._function = function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        leaves, self._spec = tree_flatten((cells, args))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places_of = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._made: Any = None
        self._result: list[Any] = []

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function on `tensors`; return its result's new tensors, each storage once (no aliases)."""
        leaves = list(self._others)
        for at, tensor in zip(self._places_of, tensors, strict=True):
            leaves[at] = tensor
        cells, args = tree_unflatten(leaves, self._spec)
        function = FunctionType(
            self._function.__code__, self._function.__globals__, closure=tuple(CellType(value) for value in cells)
        )
        found, self._made = tree_flatten(function(*args))
        new: dict[int, torch.Tensor] = {}
        given = {_storage(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
        for leaf in found:
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given:
                known = new.get(_storage(leaf))
                if known is None or known.numel() < leaf.numel():
                    new[_storage(leaf)] = leaf
        numbers = {address: number for number, address in enumerate(new)}
        self._result = []
        for leaf in found:
            if not isinstance(leaf, torch.Tensor):
                self._result.append(leaf)
                continue
            address = _storage(leaf)
            base = tensors[given[address]] if address in given else new[address]
            index_of_same = next((number for number, tensor in enumerate(tensors) if tensor is leaf), None)
            is_given = address in given
            number = (given[address] if index_of_same is None else index_of_same) if is_given else numbers[address]
            whole = index_of_same is not None or leaf is base
            view = None if whole else (tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))
            self._result.append(_TensorSource(is_given, number, view))
        return list(new.values())

    def result(self, made: list[torch.Tensor]) -> Any:
        """Return the function's result, assembled from the operator's outputs."""

        def leaf(place: Any) -> Any:
            if not isinstance(place, _TensorSource):
                return place
            tensor = (self.tensors if place.given else made)[place.number]
            return tensor if place.view is None else torch.as_strided(tensor, *place.view)

        return tree_unflatten([leaf(place) for place in self._result], self._made)


_calls: list[_GraphCall] = []  # by the number that the graph passes to the operator
_functions: list[Any] = []  # functions that are one operator of a graph
_operator: Any = None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether any of the values is being traced into a graph."""
    if not dynamo.FunctionalTensor.is_imported():
        return False
    functional = dynamo.FunctionalTensor.get()
    return any(isinstance(value, functional) for value in values)


def called(function: Any, *args: Any) -> Any:
    """Call `function`, which makes new tensors and writes into none, as one operator of the graph that is traced."""
    call = _GraphCall(function, args)
    _calls.append(call)
    return call.result(_get_operator()(len(_calls) - 1, call.tensors))


def _get_operator() -> Any:
    global _operator
    if _operator is None:

        def run(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return _calls[call].run(tensors)

        schema = "(int call, Tensor[] tensors) -> Tensor[]"
        _operator = torch.library.custom_op(_NAME, run, mutates_args=(), schema=schema)
        _operator.register_fake(run)
    return _operator


def forget() -> None:
    """Forget the graphs of this run, which are not called any more."""
    _calls.clear()


def keep(function: Any) -> None:
    """Register `function` as one operator of a graph."""
    _functions.append(function)
    if dynamo.allow_in_graph.is_imported():
        torch.compiler.allow_in_graph(function)


def prepare() -> Iterator[Patch]:
    """Register the functions kept so far with dynamo, once dynamo is imported; no patch is yielded."""
    for function in _functions:
        torch.compiler.allow_in_graph(function)
    yield from ()
