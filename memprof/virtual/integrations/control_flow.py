"""torch.cond, while_loop and scan, run as plain Python: the virtual GPU sees their operators and gradients.

Each function has an operator for tracing, which needs a rule for each dispatch mode. The functions below do what the
operators' dense kernels do (torch/_higher_order_ops). The host reads each condition, as in these kernels.
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
    """Operators of control flow, as far as torch has imported them.

    The patches replace the operators' dispatch and not their names: torch.compile, which each function calls, writes
    the operator into its graph without a lookup of the name.
    """

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of each operator's dispatch, which run its dense kernel under an untraced virtual GPU."""
        names = (dispatch.dispatch_cond, dispatch.dispatch_while_loop, dispatch.dispatch_scan)
        kernels: tuple[Callable[..., Any], ...] = (_cond, _while_loop, _scan)
        for name, dense in zip(names, kernels, strict=True):
            if name.is_imported() and name.exists():
                yield name.patch(functools.partial(_run_dense, name.get(), dense))


def _run_dense(by_key: Callable[..., Any], dense: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    is_virtual = isinstance(get_current_dispatch_mode(), DeviceState)
    return dense(*args, **kwargs) if is_virtual else by_key(key, *args, **kwargs)


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
    return dispatch.generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)
