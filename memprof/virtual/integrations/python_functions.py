"""torch's own Python functions (`torch.nn.functional` and others) under a function mode.

Such a function passes itself to an active mode and then runs with the mode off, so that the mode would miss tensors
that it creates. Here the functions run as plain Python under the mode, which sees the C++ functions that they call.
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
    """Patches by which torch's Python functions run under the function mode."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the checks (`has_torch_function`) by which a function decides to pass itself to a mode."""
        yield from patch_python_functions()


def patch_python_functions() -> Iterator[Patch]:
    """Yield patches (owner, name, replacement) of `has_torch_function` and its variants in torch's imported modules."""
    checks = {name: getattr(dispatch, name) for name in _REPLACEMENTS}
    for module_name in sys.modules.keys() - _INSPECTED_MODULES:  # inspects each of transformers' many modules once
        module = sys.modules.get(module_name)
        if module is None:
            continue
        _INSPECTED_MODULES.add(module_name)
        if module_name == "torch" or module_name.startswith("torch."):
            check_names = [name for name in checks if vars(module).get(name) is checks[name]]
            if check_names:
                _CHECKS_BY_MODULE[module_name] = check_names
    for module_name, check_names in _CHECKS_BY_MODULE.items():
        module = sys.modules.get(module_name)
        for name in check_names:
            if module is not None and vars(module).get(name) is checks[name]:
                yield module, name, _REPLACEMENTS[name]


_INSPECTED_MODULES: set[str] = set()
_CHECKS_BY_MODULE: dict[str, list[str]] = {}  # module -> torch's three override checks that the module has imported


def _has_torch_function(tensors: Any) -> bool:
    """Return whether a tensor subclass or the program's own mode overrides the call, as `check_has_torch_function` of
    torch/csrc/utils/disable_torch_function.cpp does."""
    depth = dispatch.len_torch_function_stack()
    innermost = dispatch.get_function_stack_at(depth - 1) if depth else None
    is_program_mode = innermost is not None and not isinstance(innermost, MemprofFunctionMode)
    if is_program_mode and not dispatch.is_torch_function_all_disabled():
        return True
    if not dispatch.is_torch_function_enabled():  # a subclass runs the function itself
        return False
    for tensor in tensors:
        tensor_type = type(tensor)
        if tensor_type is torch.Tensor or tensor_type is torch.nn.Parameter:
            continue
        handler = getattr(tensor_type, "__torch_function__", None)
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
