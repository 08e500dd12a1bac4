"""What a stack of layers is given, if it needs a gradient: how the graph that made it is let go of.

Objects that Python has seen, and those of autograd functions written in Python, are let go of by Python, which puts
off what is nested deep; nodes of C++ that nobody has looked at are not. Where a tensor hangs at the end of a graph that
nothing else holds, that decides when it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memprof.virtual.repeat.backward import RunAgain


@contextmanager
def applied_functions() -> Iterator[list[type]]:
    """Inside, autograd functions written in Python that are applied.

    The graph itself is not looked through for them: a node that Python has seen is let go of in another order.
    """
    functions: list[type] = []
    kept = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        functions.append(cls)
        return kept.__func__(cls, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010 - mypy takes it for a method
    try:
        yield functions
    finally:
        setattr(torch.autograd.Function, "apply", kept)  # noqa: B010


def ends_in_leaf(tensor: torch.Tensor, trained_between: Callable[[], bool]) -> bool:
    """Whether a graph may be the last to hold a tensor at its end, as it holds one that is no parameter.

    Args:
        tensor: the graph made this.
        trained_between: whether anything outside the model's stacks is trained. If nothing is, another stack has made
            it, or it comes from such a leaf: then the graph is not looked through, which would change how it is freed.

    Raises:
        RunAgain: it was looked through, and there is one.
    """
    if tensor.is_leaf:
        return not isinstance(tensor, nn.Parameter)
    if not trained_between():
        return True
    ends = [getattr(node, "variable", None) for node in _graph(tensor)]
    if any(end is not None and not isinstance(end, nn.Parameter) for end in ends):
        raise RunAgain("a graph was looked through that is the last to hold a tensor")
    return False


def _graph(tensor: torch.Tensor) -> Iterator[Any]:
    """Its nodes."""
    met: set[Any] = {tensor.grad_fn}
    left = list(met)
    while left:
        node = left.pop()
        if node is not None:
            yield node
            new = {following for following, _ in node.next_functions} - met
            met |= new
            left.extend(new)
