"""The two kinds of host tensors, and the gradients that pass between them.

A host tensor is *real*, a CPU tensor with data, or *virtual*, on the meta device with `cpu` as the device that the
program sees. Its kind never changes: virtual if it was created with 1 MiB or more, or from a virtual tensor, else real.
autograd compares devices, so that a gradient and its accumulation node are of the tensor's kind:

* A function with arguments of both kinds returns a virtual tensor. It receives a virtual copy of each real operand
  that requires a gradient, and the copy's backward returns a real gradient. In-place functions follow their target.
* A gradient that Python code passes to the engine (`backward(gradient)`, a Function's backward, a tensor's hook) is
  converted to the kind of its tensor, if both are on the host. Another device is an error, as on CUDA.

These copies are not memory of the program, and are not recorded. A real gradient made from a virtual gradient holds
the known values, else ones (values/policy.py).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.torch_private import autograd as private_autograd
from memprof.torch_private.pytree import tree_leaves, tree_map_only
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import REAL, DeviceState
from memprof.virtual.legacy_types import get_legacy_name
from memprof.virtual.operator_call import find_tensors, is_in_place

_META = torch.device("meta")
_CPU = torch.device("cpu")
_linear = torch.nn.functional.linear
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MODULE_HOOKS = (
    (torch.nn.Module, "register_backward_hook"),
    (torch.nn.Module, "register_full_backward_hook"),
    (torch.nn.Module, "register_full_backward_pre_hook"),
    (torch.nn.modules.module, "register_module_backward_hook"),
    (torch.nn.modules.module, "register_module_full_backward_hook"),
    (torch.nn.modules.module, "register_module_full_backward_pre_hook"),
)


class _Placement(NamedTuple):
    device: str
    is_virtual: bool


class HostKinds:
    """Conversions that give operands and gradients one kind of host tensor, where autograd records them."""

    def __init__(self, device_state: DeviceState, move_gradient: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._device_state = device_state
        self._move_gradient = move_gradient
        # Nodes of Functions written in Python -> position of an argument -> placement of the tensor.
        self._placements: weakref.WeakKeyDictionary[Any, dict[int, _Placement | None]] = weakref.WeakKeyDictionary()

    def unify_kinds(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of `func`, of one kind if a gradient has to pass between real and virtual tensors."""
        if not torch.is_grad_enabled():
            return args, kwargs
        if is_in_place(func) and args and isinstance(args[0], torch.Tensor) and self._is_real(args[0]):
            with torch.DisableTorchFunction():
                return tree_map_only(
                    torch.Tensor, lambda t: self._to_kind(t, False) if t.requires_grad else t, (args, kwargs)
                )
        if not _tracks_real(args) and not (kwargs and _tracks_real(tuple(kwargs.values()))):
            return args, kwargs
        if not any(self._is_virtual(tensor) for tensor in find_tensors([*args, *kwargs.values()])):
            return args, kwargs

        with torch.DisableTorchFunction():
            tracked_tensors = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.requires_grad and self._is_real(leaf)
            ]
            # The engine runs the newest node first, and a gradient reaches the first operand first.
            if getattr(func, "__wrapped__", func) is not _linear:  # addmm(bias, input, weight.t()), native/Linear.cpp
                tracked_tensors.reverse()
            copies = {id(tensor): self.to_virtual(tensor) for tensor in tracked_tensors}
            return tree_map_only(torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), (args, kwargs))

    def make_virtual(self, args: Any, is_selected: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Any:
        """Return the arguments of a function that compares devices in C++, with the host tensors for which
        `is_selected` is true made virtual if one of them is."""
        with torch.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and is_selected(leaf)]
            if not any(map(self._is_virtual, tensors)):
                return args
            return tree_map_only(
                torch.Tensor, lambda t: self.to_virtual(t) if is_selected(t) and self._is_real(t) else t, args
            )

    def match_kind(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the host tensor `tensor`, converted to the kind (real or virtual) of `other`."""
        with torch.DisableTorchFunction():
            return self._to_kind(tensor, other.is_meta)

    def _to_kind(self, gradient: Any, is_virtual: bool) -> Any:
        """Return `gradient` made virtual or real, if it is a host tensor; return any other value unchanged."""
        if type(gradient) not in _PLAIN:
            return gradient
        with torch.DisableTorchFunction():
            if gradient.is_meta is is_virtual:
                return gradient
            if is_virtual:
                return self.to_virtual(gradient) if self._is_real(gradient) else gradient
            return self.to_real(gradient) if self._is_virtual(gradient) else gradient

    def to_virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a virtual copy of a real host tensor, with its values; autograd records the copy."""
        with torch.DisableTorchFunction(), self._device_state.factory_device_as(HOST):
            return torch.ops.aten._to_copy.default(tensor, device=_META)

    def to_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real copy of a virtual host tensor, with known or assumed values; autograd records the copy."""
        with torch.DisableTorchFunction(), self._device_state.factory_device_as(REAL):
            return torch.ops.aten._to_copy.default(tensor, device=_CPU)

    def _is_virtual(self, tensor: torch.Tensor) -> bool:
        with torch.DisableTorchFunction():
            return tensor.is_meta and type(tensor) in _PLAIN and self._device_state.device_of(tensor) == HOST

    def _is_real(self, tensor: torch.Tensor) -> bool:
        with torch.DisableTorchFunction():
            return type(tensor) in _PLAIN and tensor.device.type == HOST and not tensor.is_quantized

    # -- gradients that Python code hands to the engine ---------------------------------------------------------------

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the patches (owner, name, replacement)."""
        autograd = torch.autograd
        yield private_autograd.engine_run_backward.patch(self._wrap_engine(private_autograd.engine_run_backward.get()))
        yield autograd.Function, "apply", self._wrap_function_apply(autograd.Function.__dict__["apply"])
        backward = autograd.function.BackwardCFunction
        for name in ("apply", "apply_boxed"):
            if hasattr(backward, name):  # torch 2.13 has `apply_boxed`
                yield backward, name, self._wrap_backward_call(getattr(backward, name))
        yield torch.Tensor, "register_hook", self._wrap_register_hook(torch.Tensor.register_hook)
        for owner, name in _MODULE_HOOKS:
            yield owner, name, self._wrap_module_hooks(getattr(owner, name))

    def _wrap_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for the engine's run_backward that converts gradients to the kind of their outputs."""

        def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            checked_gradients = tuple(
                self._check_gradient(gradient, self._get_placement(output), f"invalid gradient at index {index}")
                for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
            )
            return original(outputs, checked_gradients, *args, **kwargs)

        return run_backward

    def _wrap_function_apply(self, original: Any) -> Any:
        """Return a replacement for `Function.apply` that stores device and kind of the tensor arguments."""

        @functools.wraps(original.__func__)  # TorchScript reads the signature of a Function that it calls
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__func__(cls, *args, **kwargs)
            if torch.is_grad_enabled():
                with torch.DisableTorchFunction():
                    nodes = (tensor.grad_fn for tensor in find_tensors(result))
                    node = next((node for node in nodes if getattr(node, "_forward_cls", None) is cls), None)
                if node is not None:
                    positional_args = _bind_positional(cls.forward, args, kwargs) if kwargs else args
                    self._placements[node] = {
                        index: self._get_placement(arg)
                        for index, arg in enumerate(positional_args)
                        if isinstance(arg, torch.Tensor)
                    }
            return result

        return classmethod(apply)

    def _wrap_backward_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a Function's backward, with gradients converted to the kind of its inputs."""

        def apply(node: Any, *gradients: Any) -> Any:
            result = original(node, *gradients)
            results = list(result) if isinstance(result, tuple) else [result]
            for input_index, (argument_index, placement) in enumerate(self._placements.get(node, {}).items()):
                if argument_index < len(results) and node.needs_input_grad[argument_index]:
                    message = f"Function {type(node).__name__} returned an invalid gradient at index {input_index}"
                    results[argument_index] = self._check_gradient(results[argument_index], placement, message)
            return tuple(results) if isinstance(result, tuple) else results[0]

        return apply

    def _wrap_register_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `Tensor.register_hook` that converts a hook's result to the kind of its argument."""

        @functools.wraps(original)  # subclasses receive this function, and compare it with the original
        def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            if type(tensor) not in _PLAIN:  # a subclass may ignore the hook
                return original(tensor, hook)

            def run_and_check(gradient: torch.Tensor) -> Any:
                return self._check_hook_result(gradient, hook(gradient), run_and_check.__name__)

            run_and_check.__name__ = getattr(hook, "__name__", type(hook).__name__)
            return original(tensor, run_and_check)

        return register_hook

    def _wrap_module_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `original`, which registers a backward hook of modules; gradients that the hook
        returns are converted to the kind of those that they replace."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            hook = bound.arguments["hook"]

            @functools.wraps(hook, updated=())
            def run_and_check(module: torch.nn.Module, gradients: Any, *remaining_args: Any) -> Any:
                result = hook(module, gradients, *remaining_args)
                changed = result if isinstance(result, tuple) else (result,)
                if len(changed) != len(gradients):
                    return result  # torch raises an error
                checked = tuple(self._check_hook_result(*pair, "hook") for pair in zip(gradients, changed, strict=True))
                return checked if isinstance(result, tuple) else checked[0]

            bound.arguments["hook"] = run_and_check
            return original(*bound.args, **bound.kwargs)

        return register

    def _check_hook_result(self, gradient: Any, result: Any, name: str) -> Any:
        """Return `result` of the hook `name`, simulated as `gradient` is, after python_hook.cpp's checks.

        Raises:
            RuntimeError: the result is on another device.
        """
        expected, actual = self._get_placement(gradient), self._get_placement(result)
        if expected is None or actual is None:
            return result
        if is_gpu(expected.device) != is_gpu(actual.device):
            old_type, new_type = (
                get_legacy_name(tensor.dtype, placement.device)
                for tensor, placement in ((gradient, expected), (result, actual))
            )
            raise RuntimeError(f"hook '{name}' has changed the type of value (was {old_type} got {new_type})")
        return self._to_kind(result, expected.is_virtual)

    def _get_placement(self, tensor: Any) -> _Placement | None:
        """Return where a plain, non-empty tensor is, host or GPU, and how it is simulated; None for other values."""
        if type(tensor) not in _PLAIN:
            return None
        with torch.DisableTorchFunction():
            if not tensor.numel():
                return None
            device = self._device_state.device_of(tensor)
            return _Placement(device, tensor.is_meta) if device == HOST or is_gpu(device) else None

    def _check_gradient(self, gradient: Any, expected: _Placement | None, message: str) -> Any:
        """Return `gradient`, converted to `expected`; checked as by `validate_outputs` of torch's engine.cpp.

        Raises:
            RuntimeError: the devices differ; a 0-dimensional gradient is moved, as the engine does.
        """
        actual = self._get_placement(gradient)
        if expected is None or actual is None:
            return gradient
        if actual.device != expected.device:
            if gradient.dim():
                raise RuntimeError(f"{message} - expected device {expected.device} but got {actual.device}")
            gradient = self._move_gradient(gradient, expected.device)
        return self._to_kind(gradient, expected.is_virtual)


def _bind_positional(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a Function by position, as autograd numbers their gradients."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _tracks_real(values: Any) -> bool:
    """Return whether a real tensor in `values`, or in nested collections, requires a gradient."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta and value.requires_grad and value.dim():
                return True
        elif isinstance(value, (list, tuple)) and _tracks_real(value):
            return True
    return False
