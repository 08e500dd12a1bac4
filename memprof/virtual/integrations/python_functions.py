"""torch's own Python functions (`torch.nn.functional` and others) under a function mode.

These functions pass themselves to an active mode and then run with the mode off, so that the mode would miss a factory
in them. Here the functions run as plain Python under the mode, which sees the C++ functions that they call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.virtual.function_mode import MemprofFunctionMode
from memprof.virtual.install_context import InstallContext


class PythonFunctions(Extension):
    """The functions of torch that are written in Python."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the checks by which the functions pass themselves to a mode."""
        yield from python_function_patches()


def python_function_patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, replacement) that run torch's Python functions under an active function mode."""
    functions = {name: getattr(dispatch, name) for name in _REPLACEMENTS}
    for module_name in sys.modules.keys() - _INSPECTED:  # inspects each of transformers' many modules once
        module = sys.modules.get(module_name)
        if module is None:
            continue
        _INSPECTED.add(module_name)
        if module_name == "torch" or module_name.startswith("torch."):
            calls = [name for name in functions if vars(module).get(name) is functions[name]]
            if calls:
                _CALLS[module_name] = calls
    for module_name, calls in _CALLS.items():
        module = sys.modules.get(module_name)
        for name in calls:
            if module is not None and vars(module).get(name) is functions[name]:
                yield module, name, _REPLACEMENTS[name]


_INSPECTED: set[str] = set()
_CALLS: dict[str, list[str]] = {}  # module -> torch's three override checks that the module has imported


def _has_torch_function(tensors: Any) -> bool:
    """Return whether a tensor subclass, or a mode of the program's own, overrides the call, as torch checks it
    (`check_has_torch_function` of torch/csrc/utils/disable_torch_function.cpp)."""
    depth = dispatch.len_torch_function_stack()
    innermost = dispatch.get_function_stack_at(depth - 1) if depth else None
    is_of_program = innermost is not None and not isinstance(innermost, MemprofFunctionMode)
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
    "has_torch_function": _has_torch_function,
    "has_torch_function_unary": lambda tensor: _has_torch_function((tensor,)),
    "has_torch_function_variadic": lambda *tensors: _has_torch_function(tensors),
}
for _replacement in _REPLACEMENTS.values():
    # TorchScript does not compile these replacements in a function of torch, but uses a builtin operator instead.
    dispatch.register_builtin(_replacement, "aten::has_torch_function")
