"""The two kinds of host tensors, and the gradients that pass between them.

A host tensor is *real*, one of torch's own with numbers in memory, or *virtual*, on the meta device with `cpu` as the
device that the program sees. Its kind never changes: virtual if it was made with 1 MiB or more, or from a virtual
tensor, else real. autograd compares devices, so that a gradient and its accumulation node are of the tensor's kind:

* A function with arguments of both kinds returns a virtual tensor. It receives a virtual copy of each real operand
  that requires a gradient, and the copy's backward returns a real gradient. In-place functions follow their target.
* A gradient that Python code passes to the engine (`backward(gradient)`, a Function's backward, a tensor's hook) is
  converted to the kind of its tensor, if that is on the host as well. Another device is an error, as on CUDA.

These copies are no memory of the program, and are not recorded. A real gradient made from a virtual gradient holds the
known numbers, else ones (values/policy.py).
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
from memprof.virtual.legacy_types import legacy_name
from memprof.virtual.operator_call import find_tensors, in_place

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

    def __init__(self, device_state: DeviceState, move: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._device_state = device_state
        self._move = move
        # Nodes of Functions written in Python -> position of an argument -> placement of the tensor.
        self._inputs: weakref.WeakKeyDictionary[Any, dict[int, _Placement | None]] = weakref.WeakKeyDictionary()

    def alike(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of `func`, of one kind if a gradient has to pass between real and virtual tensors."""
        if not torch.is_grad_enabled():
            return args, kwargs
        if in_place(func) and args and isinstance(args[0], torch.Tensor) and self._is_real(args[0]):
            with torch.DisableTorchFunction():
                return tree_map_only(
                    torch.Tensor, lambda one: self._to_kind(one, False) if one.requires_grad else one, (args, kwargs)
                )
        if not _tracks_real(args) and not (kwargs and _tracks_real(tuple(kwargs.values()))):
            return args, kwargs
        if not any(self._is_virtual(tensor) for tensor in find_tensors([*args, *kwargs.values()])):
            return args, kwargs

        with torch.DisableTorchFunction():
            tracked = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.requires_grad and self._is_real(leaf)
            ]
            # The engine runs the newest node first, and a gradient reaches the first operand first.
            if getattr(func, "__wrapped__", func) is not _linear:  # addmm(bias, input, weight.t()), native/Linear.cpp
                tracked.reverse()
            copies = {id(tensor): self.to_virtual(tensor) for tensor in tracked}
            return tree_map_only(torch.Tensor, lambda one: copies.get(id(one), one), (args, kwargs))

    def all_virtual(self, args: Any, only: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Any:
        """Return the arguments of a function that compares devices in C++: the host tensors that `only` selects are
        virtual if one of them is virtual."""
        with torch.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and only(leaf)]
            if not any(map(self._is_virtual, tensors)):
                return args
            return tree_map_only(
                torch.Tensor, lambda one: self.to_virtual(one) if only(one) and self._is_real(one) else one, args
            )

    def like(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the host tensor `tensor`, converted to the kind of `other`."""
        with torch.DisableTorchFunction():
            return self._to_kind(tensor, other.is_meta)

    def _to_kind(self, gradient: Any, is_virtual: bool) -> Any:
        """Return a host gradient, converted to the wanted kind; return any other value unchanged."""
        if type(gradient) not in _PLAIN:
            return gradient
        with torch.DisableTorchFunction():
            if gradient.is_meta is is_virtual:
                return gradient
            if is_virtual:
                return self.to_virtual(gradient) if self._is_real(gradient) else gradient
            return self.to_real(gradient) if self._is_virtual(gradient) else gradient

    def to_virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a virtual copy of a real host tensor, with its numbers; autograd records the copy."""
        with torch.DisableTorchFunction(), self._device_state.factory_device_as(HOST):
            return torch.ops.aten._to_copy.default(tensor, device=_META)

    def to_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real copy of a virtual host tensor, with numbers by the policy; autograd records the copy."""
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
        """Return the replacement for the engine's run_backward: gradients get the kind of their outputs."""

        def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            alike = tuple(
                self._check_gradient(gradient, self._placement_of(output), f"invalid gradient at index {index}")
                for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
            )
            return original(outputs, alike, *args, **kwargs)

        return run_backward

    def _wrap_function_apply(self, original: Any) -> Any:
        """Return the replacement for `Function.apply`, which stores the placements of the tensor arguments."""

        @functools.wraps(original.__func__)  # TorchScript reads the signature of a Function that it calls
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__func__(cls, *args, **kwargs)
            if torch.is_grad_enabled():
                with torch.DisableTorchFunction():
                    nodes = (tensor.grad_fn for tensor in find_tensors(result))
                    node = next((node for node in nodes if getattr(node, "_forward_cls", None) is cls), None)
                if node is not None:
                    given = _bind_positional(cls.forward, args, kwargs) if kwargs else args
                    self._inputs[node] = {
                        position: self._placement_of(arg)
                        for position, arg in enumerate(given)
                        if isinstance(arg, torch.Tensor)
                    }
            return result

        return classmethod(apply)

    def _wrap_backward_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for the call of a Function's backward: gradients get the kind of its inputs."""

        def apply(node: Any, *gradients: Any) -> Any:
            returned = original(node, *gradients)
            several = list(returned) if isinstance(returned, tuple) else [returned]
            for index, (position, place) in enumerate(self._inputs.get(node, {}).items()):
                if position < len(several) and node.needs_input_grad[position]:
                    message = f"Function {type(node).__name__} returned an invalid gradient at index {index}"
                    several[position] = self._check_gradient(several[position], place, message)
            return tuple(several) if isinstance(returned, tuple) else several[0]

        return apply

    def _wrap_register_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `Tensor.register_hook`: a hook's result gets the kind of its argument."""

        @functools.wraps(original)  # subclasses receive this function, and compare it with the original
        def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            if type(tensor) not in _PLAIN:  # a subclass may ignore the hook
                return original(tensor, hook)

            def run(gradient: torch.Tensor) -> Any:
                return self._check_hook_result(gradient, hook(gradient), run.__name__)

            run.__name__ = getattr(hook, "__name__", type(hook).__name__)
            return original(tensor, run)

        return register_hook

    def _wrap_module_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for the registration of a module's backward hooks: the gradients that a hook returns
        get the kind of the gradients that they replace, the hook's last argument but one."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            hook = bound.arguments["hook"]

            @functools.wraps(hook, updated=())
            def run(module: torch.nn.Module, gradients: Any, *rest: Any) -> Any:
                changed = hook(module, gradients, *rest)
                several = changed if isinstance(changed, tuple) else (changed,)
                if len(several) != len(gradients):
                    return changed  # torch raises an error
                kept = tuple(self._check_hook_result(*pair, "hook") for pair in zip(gradients, several, strict=True))
                return kept if isinstance(changed, tuple) else kept[0]

            bound.arguments["hook"] = run
            return original(*bound.args, **bound.kwargs)

        return register

    def _check_hook_result(self, gradient: Any, changed: Any, name: str) -> Any:
        """Return the result of the hook `name` for `gradient`, checked as in torch/csrc/autograd/python_hook.cpp.

        Raises:
            RuntimeError: the result is on another device.
        """
        place, now = self._placement_of(gradient), self._placement_of(changed)
        if place is None or now is None:
            return changed
        if is_gpu(place.device) != is_gpu(now.device):
            was, got = (
                legacy_name(one.dtype, on_gpu=is_gpu(where.device))
                for one, where in ((gradient, place), (changed, now))
            )
            raise RuntimeError(f"hook '{name}' has changed the type of value (was {was} got {got})")
        return self._to_kind(changed, place.is_virtual)

    def _placement_of(self, tensor: Any) -> _Placement | None:
        """Return the placement of a plain tensor with elements on the host or a GPU; None for any other value."""
        if type(tensor) not in _PLAIN:
            return None
        with torch.DisableTorchFunction():
            if not tensor.numel():
                return None
            device = self._device_state.device_of(tensor)
            return _Placement(device, tensor.is_meta) if device == HOST or is_gpu(device) else None

    def _check_gradient(self, gradient: Any, place: _Placement | None, message: str) -> Any:
        """Return `gradient` for a tensor at `place`, checked as in torch/csrc/autograd/engine.cpp (`validate_outputs`).

        Raises:
            RuntimeError: the devices differ, and the gradient is no scalar tensor, which the engine would move.
        """
        own = self._placement_of(gradient)
        if place is None or own is None:
            return gradient
        if own.device != place.device:
            if gradient.dim():
                raise RuntimeError(f"{message} - expected device {place.device} but got {own.device}")
            gradient = self._move(gradient, place.device)
        return self._to_kind(gradient, place.is_virtual)


def _bind_positional(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a Function by position: autograd has one gradient for each."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _tracks_real(values: Any) -> bool:
    """Return whether autograd tracks one of the real tensors among `values`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta and value.requires_grad and value.dim():
                return True
        elif isinstance(value, (list, tuple)) and _tracks_real(value):
            return True
    return False
