"""Stubs in compiled code: one operator of a graph each, as the real ones register theirs (torch.library).

Dynamo puts the call of a function of another library into its graph as it is, if the function asks for that.
AOTAutograd then runs it to see the operators inside, which for a stub are only those that allocate. So, while a
graph is traced, what a kernel does is put behind one operator, `memprof_stubs::call`, which Inductor takes as
made by somebody else; when compiled code runs, it allocates as an eager call does, scratch memory included.
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
    """The place of a result's tensor: in an argument, or in what the operator gives."""

    given: bool
    number: int
    view: tuple[Any, Any, int] | None  # its sizes, strides and offset there; None: it is the whole


class _GraphCall:
    """One call that is in a graph: of what, with what beside tensors, and how its result is put together.

    Tensors that the function has from around it are arguments too: another call of the graph has others there.
    """

    def __init__(self, function: FunctionType, args: tuple[Any, ...]) -> None:
        self._function = function
        held = tuple(cell.cell_contents for cell in function.__closure__ or ())
        leaves, self._spec = tree_flatten((held, args))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places_of = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._made: Any = None
        self._result: list[Any] = []

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call it on these: the new tensors of its result, each storage once, as operators must not alias."""
        leaves = list(self._others)
        for at, tensor in zip(self._places_of, tensors, strict=True):
            leaves[at] = tensor
        held, args = tree_unflatten(leaves, self._spec)
        function = FunctionType(
            self._function.__code__, self._function.__globals__, closure=tuple(CellType(value) for value in held)
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
            same = next((number for number, tensor in enumerate(tensors) if tensor is leaf), None)
            is_given = address in given
            number = (given[address] if same is None else same) if is_given else numbers[address]
            whole = same is not None or leaf is base
            view = None if whole else (tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))
            self._result.append(_TensorSource(is_given, number, view))
        return list(new.values())

    def result(self, made: list[torch.Tensor]) -> Any:
        """Return the function's result, made from the operator's."""

        def leaf(place: Any) -> Any:
            if not isinstance(place, _TensorSource):
                return place
            tensor = (self.tensors if place.given else made)[place.number]
            return tensor if place.view is None else torch.as_strided(tensor, *place.view)

        return tree_unflatten([leaf(place) for place in self._result], self._made)


_calls: list[_GraphCall] = []  # by the number that a graph has of each
_functions: list[Any] = []  # what is one operator of a graph
_operator: Any = None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether these tensors are being traced into a graph."""
    if not dynamo.FunctionalTensor.is_imported():
        return False
    functional = dynamo.FunctionalTensor.get()
    return any(isinstance(value, functional) for value in values)


def called(function: Any, *args: Any) -> Any:
    """Call `function`, which makes new tensors and writes into none, as one operator of the graph that is traced."""
    call = _GraphCall(function, args)
    _calls.append(call)
    return call.result(_registered()(len(_calls) - 1, call.tensors))


def _registered() -> Any:
    global _operator
    if _operator is None:

        def run(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return _calls[call].run(tensors)

        schema = "(int call, Tensor[] tensors) -> Tensor[]"
        _operator = torch.library.custom_op(_NAME, run, mutates_args=(), schema=schema)
        _operator.register_fake(run)
    return _operator


def forget() -> None:
    """Forget the graphs of this run: none is called any more."""
    _calls.clear()


def keep(function: Any) -> None:
    """A graph takes `function` as one operator."""
    _functions.append(function)
    if dynamo.allow_in_graph.is_imported():
        torch.compiler.allow_in_graph(function)


def prepare() -> Iterator[Patch]:
    """Tell dynamo, which is there now, of those that were kept before; nothing is replaced."""
    for function in _functions:
        torch.compiler.allow_in_graph(function)
    yield from ()
