"""torch.cond, while_loop and scan, run as plain Python: the virtual GPU sees the operators in their bodies.

Each function has an operator for tracing, which needs a rule for each dispatch mode. The functions below do what the
operators' dense kernels do (torch/_higher_order_ops). As there, the host reads each condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.torch_private.dispatch import get_current_dispatch_mode
from memprof.virtual.device_state import DeviceState
from memprof.virtual.install_context import InstallContext


class ControlFlow(Extension):
    """torch's control-flow operators, those that torch has imported.

    The patches replace the operators' dispatch and not their names: torch.compile, which each function calls, writes
    the operator into its graph without a lookup of the name.
    """

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of each operator's dispatch, which run its dense kernel unless a tracer is active."""
        dispatchers = (dispatch.dispatch_cond, dispatch.dispatch_while_loop, dispatch.dispatch_scan)
        kernels: tuple[Callable[..., Any], ...] = (_cond, _while_loop, _scan)
        for dispatcher, kernel in zip(dispatchers, kernels, strict=True):
            if dispatcher.is_imported() and dispatcher.exists():
                yield dispatcher.patch(functools.partial(_run_dense, dispatcher.get(), kernel))


def _run_dense(original: Callable[..., Any], kernel: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    is_virtual = isinstance(get_current_dispatch_mode(), DeviceState)
    return kernel(*args, **kwargs) if is_virtual else original(key, *args, **kwargs)


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any, additional_inputs: Any = ()
) -> Any:
    carried_values = tuple(carried_inputs)
    while bool(cond_fn(*carried_values, *additional_inputs)):
        carried_values = tuple(body_fn(*carried_values, *additional_inputs))
    return carried_values


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return dispatch.generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)
