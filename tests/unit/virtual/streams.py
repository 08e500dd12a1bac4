"""The stream of operators that a program runs, as names, dtypes and shapes: to compare two runs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NoTorchFunction = torch._C.DisableTorchFunction
_NOT_COMPUTED = {"aten::detach", "prim::device"}


class Seen(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class Op(NamedTuple):
    """One operator that ran below autograd."""

    name: str
    inputs: tuple[Seen, ...]
    outputs: tuple[Seen, ...]
    backward: bool
    function: str  # The torch function that ran it (in a forward, under `Functions`).


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.function = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _NoTorchFunction():
            inputs = _seen((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in _NOT_COMPUTED:
            with _NoTorchFunction():
                backward = torch._C._current_graph_task_id() != -1
                name = func._schema.name.removeprefix("aten::")
                self.ops.append(Op(name, inputs, _seen(result), backward, self.function))
        return result


def _seen(value: Any) -> tuple[Seen, ...]:
    return tuple(Seen(t.dtype, tuple(t.shape)) for t in tree_leaves(value) if isinstance(t, torch.Tensor))


class Layout(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


class Called(NamedTuple):
    """One call of a torch function that ran operators, with the layouts of its tensors."""

    function: Any
    name: str
    arguments: Any
    ops: list[Op]
    autocast: torch.dtype | None  # The dtype of the autocast region that it was in, if any.


class Functions(TorchFunctionMode):
    """Notes every call of a torch function inside it that runs operators."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.calls: list[Called] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        arguments = tree_map(_layout, (tuple(args), dict(kwargs)))
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        operators = self.operators
        before, outer, operators.function = len(operators.ops), operators.function, name
        try:
            result = func(*args, **kwargs)
        finally:
            operators.function = outer
        if len(operators.ops) > before:
            self.calls.append(Called(func, name, arguments, operators.ops[before:], dtype))
        return result


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    device = value.device.type
    with _NoTorchFunction():
        return Layout(tuple(value.shape), value.stride(), value.dtype, device)


def on_fake_cuda(program: Callable[[], Any], autocast: torch.dtype | None) -> list[Op]:
    """What torch's own dispatcher runs for `program` on fake CUDA tensors, under its own autocast; forward alone."""
    operators = Operators()
    if autocast is not None:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", autocast)
    try:
        with FakeTensorMode(), operators:
            program()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()
    return operators.ops


def again_on_fake_cuda(call: Called) -> list[Op] | None:
    """The same call on fake CUDA tensors; None if it selects a device or reads a value, which they cannot."""

    def program() -> None:
        def fake(value: Any) -> Any:
            if not isinstance(value, Layout):
                return value
            shape, stride, dtype, device = value
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

        args, kwargs = tree_map(fake, call.arguments, is_leaf=lambda value: isinstance(value, Layout))
        call.function(*args, **kwargs)

    try:
        ops = on_fake_cuda(program, call.autocast)
    except DataDependentOutputException:
        return None
    except RuntimeError as error:
        if "not linked with support for cuda" not in str(error):
            raise
        return None
    return [op for op in ops if op.name != "empty_strided"]
