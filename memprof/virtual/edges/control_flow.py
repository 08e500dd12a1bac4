"""torch.cond, while_loop and scan: as plain Python, whose operators the virtual GPU sees, gradients with them.

Each has an operator of its own for tracing, which asks dispatch modes for a rule; what its dense kernel does is below
(torch/_higher_order_ops). A condition is read by the host, as there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) of what torch has imported of them."""
    for name, replacement in {"cond": _cond, "while_loop": _while_loop, "scan": _scan}.items():
        module = sys.modules.get(f"torch._higher_order_ops.{name}")
        if module is not None and hasattr(module, f"{name}_op"):
            yield module, f"{name}_op", replacement


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any, additional_inputs: Any = ()
) -> Any:
    carried = tuple(carried_inputs)
    while bool(cond_fn(*carried, *additional_inputs)):
        carried = tuple(body_fn(*carried, *additional_inputs))
    return carried


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return sys.modules["torch._higher_order_ops.scan"].generic_scan(
        combine_fn, init, xs, additional_inputs=additional_inputs
    )
