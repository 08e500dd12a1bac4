"""torch's own Python functions (`torch.nn.functional` and friends) under a function mode.

They hand themselves to an active mode and then run with the mode taken off, so that a factory inside them would be
missed. Here they are kept from that: they run as plain Python under the mode, which sees the C++ functions that they
call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.virtual.function_mode import OwnFunctionMode
from memprof.virtual.install_context import InstallContext


class PythonFunctions(Extension):
    """The functions of torch that are written in Python."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace what they ask before they hand themselves to a mode."""
        yield from python_function_patches()


def python_function_patches() -> Iterator[Patch]:
    """The patches (owner, name, replacement) that make torch's Python functions run under an active function mode."""
    functions = {name: getattr(dispatch, name) for name in _REPLACEMENTS}
    for module_name in sys.modules.keys() - _ASKED:  # of the thousands that transformers brings, each is asked once
        module = sys.modules.get(module_name)
        if module is None:
            continue
        _ASKED.add(module_name)
        if module_name == "torch" or module_name.startswith("torch."):
            calls = [name for name in functions if vars(module).get(name) is functions[name]]
            if calls:
                _CALLS[module_name] = calls
    for module_name, calls in _CALLS.items():
        module = sys.modules.get(module_name)
        for name in calls:
            if module is not None and vars(module).get(name) is functions[name]:
                yield module, name, _REPLACEMENTS[name]


_ASKED: set[str] = set()
_CALLS: dict[str, list[str]] = {}  # module -> which of torch's three questions about overriding it has imported, if any


def _overridden(tensors: Any) -> bool:
    """Return whether a tensor subclass wants the call, or a mode of the program's own, as torch asks it
    (`check_has_torch_function` of torch/csrc/utils/disable_torch_function.cpp)."""
    depth = dispatch.len_torch_function_stack()
    innermost = dispatch.get_function_stack_at(depth - 1) if depth else None
    is_of_program = innermost is not None and not isinstance(innermost, OwnFunctionMode)
    if is_of_program and not dispatch.is_torch_function_all_disabled():
        return True
    if not dispatch.is_torch_function_enabled():  # a subclass runs the function itself
        return False
    for tensor in tensors:
        kind = type(tensor)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            continue
        handler = getattr(kind, "__torch_function__", None)
        if handler not in (None, dispatch.disabled_torch_function_impl) and handler != torch.Tensor.__torch_function__:
            return True
    return False


_REPLACEMENTS: dict[str, Any] = {
    "has_torch_function": _overridden,
    "has_torch_function_unary": lambda tensor: _overridden((tensor,)),
    "has_torch_function_variadic": lambda *tensors: _overridden(tensors),
}
for _replacement in _REPLACEMENTS.values():
    # TorchScript does not compile these where a function of torch calls them, but has an operator in their place.
    dispatch.register_builtin(_replacement, "aten::has_torch_function")
