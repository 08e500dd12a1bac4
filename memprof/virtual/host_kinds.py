"""The two kinds of host tensors, and how gradients pass between them.

A host tensor is *real*, one of torch's own with numbers in memory, or *virtual*, on the meta device with `cpu` as the
device that the program sees. It is of one kind for life: virtual if it was made with 1 MiB or more, or of something
virtual, else real. autograd compares devices, so that a tensor's gradient and what accumulates it are of its kind:

* A function that is given both kinds makes something virtual. It is given a virtual copy of each real operand that
  requires a gradient, and the copy's backward brings the gradient home. Functions in place do as their target is.
* A gradient that Python code hands to the engine (`backward(gradient)`, a Function's backward, a tensor's hook) is made
  of the kind of what it belongs to, if that is on the host as well. One from another device is refused, as by CUDA.

These copies are no memory of the program: nothing of them is recorded. A real gradient that came from a virtual one
holds the numbers that are known of it, else ones (values/policy.py).
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


class _Where(NamedTuple):
    device: str
    is_virtual: bool


class HostKinds:
    """Makes operands and gradients alike in kind, where autograd follows them."""

    def __init__(self, machine: DeviceState, move: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._machine = machine
        self._move = move
        # Nodes of Functions written in Python -> where the tensors are that these were given, by argument.
        self._inputs: weakref.WeakKeyDictionary[Any, dict[int, _Where | None]] = weakref.WeakKeyDictionary()

    def alike(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of `func`, of one kind if a gradient is to pass between real and virtual ones."""
        if not torch.is_grad_enabled():
            return args, kwargs
        if in_place(func) and args and isinstance(args[0], torch.Tensor) and self._is_real(args[0]):
            with torch.DisableTorchFunction():
                return tree_map_only(
                    torch.Tensor, lambda one: self._of_kind(one, False) if one.requires_grad else one, (args, kwargs)
                )
        if not _follows_real(args) and not (kwargs and _follows_real(tuple(kwargs.values()))):
            return args, kwargs
        if not any(self._is_virtual(tensor) for tensor in find_tensors([*args, *kwargs.values()])):
            return args, kwargs

        with torch.DisableTorchFunction():
            followed = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.requires_grad and self._is_real(leaf)
            ]
            # The engine runs first what was made last, and a gradient reaches the first operand first.
            if getattr(func, "__wrapped__", func) is not _linear:  # addmm(bias, input, weight.t()), native/Linear.cpp
                followed.reverse()
            copies = {id(tensor): self.to_virtual(tensor) for tensor in followed}
            return tree_map_only(torch.Tensor, lambda one: copies.get(id(one), one), (args, kwargs))

    def all_virtual(self, args: Any, only: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Any:
        """Arguments of a function that compares devices in C++: those of the host that are of interest, virtual if
        one of them is."""
        with torch.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and only(leaf)]
            if not any(map(self._is_virtual, tensors)):
                return args
            return tree_map_only(
                torch.Tensor, lambda one: self.to_virtual(one) if only(one) and self._is_real(one) else one, args
            )

    def like(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return a host tensor made of the kind that another is of."""
        with torch.DisableTorchFunction():
            return self._of_kind(tensor, other.is_meta)

    def _of_kind(self, gradient: Any, is_virtual: bool) -> Any:
        """Return a gradient, made of the kind of what it belongs to; anything but a host tensor as it is."""
        if type(gradient) not in _PLAIN:
            return gradient
        with torch.DisableTorchFunction():
            if gradient.is_meta is is_virtual:
                return gradient
            if is_virtual:
                return self.to_virtual(gradient) if self._is_real(gradient) else gradient
            return self.to_real(gradient) if self._is_virtual(gradient) else gradient

    def to_virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a virtual copy of a real host tensor, with its numbers; autograd sees the copy."""
        with torch.DisableTorchFunction(), self._machine.factory_device_as(HOST):
            return torch.ops.aten._to_copy.default(tensor, device=_META)

    def to_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real copy of a virtual host tensor, with numbers by the policy; autograd sees the copy."""
        with torch.DisableTorchFunction(), self._machine.factory_device_as(REAL):
            return torch.ops.aten._to_copy.default(tensor, device=_CPU)

    def _is_virtual(self, tensor: torch.Tensor) -> bool:
        with torch.DisableTorchFunction():
            return tensor.is_meta and type(tensor) in _PLAIN and self._machine.device_of(tensor) == HOST

    def _is_real(self, tensor: torch.Tensor) -> bool:
        with torch.DisableTorchFunction():
            return type(tensor) in _PLAIN and tensor.device.type == HOST and not tensor.is_quantized

    # -- gradients that Python code hands to the engine ---------------------------------------------------------------

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the patches (owner, name, replacement)."""
        autograd = torch.autograd
        yield private_autograd.engine_run_backward.patch(self._starting(private_autograd.engine_run_backward.get()))
        yield autograd.Function, "apply", self._applying(autograd.Function.__dict__["apply"])
        backward = autograd.function.BackwardCFunction
        for name in ("apply", "apply_boxed"):
            if hasattr(backward, name):  # the second is torch 2.13's
                yield backward, name, self._returning(getattr(backward, name))
        yield torch.Tensor, "register_hook", self._hooking(torch.Tensor.register_hook)
        for owner, name in _MODULE_HOOKS:
            yield owner, name, self._hooking_modules(getattr(owner, name))

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for what starts the engine: gradients are like the tensors that they belong to."""

        def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            alike = tuple(
                self._handed(gradient, self._place(output), f"invalid gradient at index {index}")
                for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
            )
            return original(outputs, alike, *args, **kwargs)

        return run_backward

    def _applying(self, original: Any) -> Any:
        """Return the replacement for `Function.apply`, which keeps where the tensors that it is given are."""

        @functools.wraps(original.__func__)  # TorchScript reads the signature of a Function that it calls
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__func__(cls, *args, **kwargs)
            if torch.is_grad_enabled():
                with torch.DisableTorchFunction():
                    nodes = (tensor.grad_fn for tensor in find_tensors(result))
                    node = next((node for node in nodes if getattr(node, "_forward_cls", None) is cls), None)
                if node is not None:
                    given = _by_position(cls.forward, args, kwargs) if kwargs else args
                    self._inputs[node] = {
                        position: self._place(arg)
                        for position, arg in enumerate(given)
                        if isinstance(arg, torch.Tensor)
                    }
            return result

        return classmethod(apply)

    def _returning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for what calls a Function's backward: what that returns is like the Function's inputs."""

        def apply(node: Any, *gradients: Any) -> Any:
            returned = original(node, *gradients)
            several = list(returned) if isinstance(returned, tuple) else [returned]
            for index, (position, place) in enumerate(self._inputs.get(node, {}).items()):
                if position < len(several) and node.needs_input_grad[position]:
                    said = f"Function {type(node).__name__} returned an invalid gradient at index {index}"
                    several[position] = self._handed(several[position], place, said)
            return tuple(several) if isinstance(returned, tuple) else several[0]

        return apply

    def _hooking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `Tensor.register_hook`: what a hook returns is like what it was given."""

        @functools.wraps(original)  # subclasses are told of this one, and know the original
        def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            if type(tensor) not in _PLAIN:  # which may do without the hook
                return original(tensor, hook)

            def run(gradient: torch.Tensor) -> Any:
                return self._changed(gradient, hook(gradient), run.__name__)

            run.__name__ = getattr(hook, "__name__", type(hook).__name__)
            return original(tensor, run)

        return register_hook

    def _hooking_modules(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for what registers backward hooks of modules: the gradients that such a hook returns are like
        those that they replace, which it is given behind the module."""
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
                    return changed  # torch refuses it
                kept = tuple(self._changed(*pair, "hook") for pair in zip(gradients, several, strict=True))
                return kept if isinstance(changed, tuple) else kept[0]

            bound.arguments["hook"] = run
            return original(*bound.args, **bound.kwargs)

        return register

    def _changed(self, gradient: Any, changed: Any, name: str) -> Any:
        """Return what the hook `name` returned for `gradient`, as torch/csrc/autograd/python_hook.cpp takes it.

        Raises:
            RuntimeError: it is on another device.
        """
        place, now = self._place(gradient), self._place(changed)
        if place is None or now is None:
            return changed
        if is_gpu(place.device) != is_gpu(now.device):
            was, got = (
                legacy_name(one.dtype, on_gpu=is_gpu(where.device))
                for one, where in ((gradient, place), (changed, now))
            )
            raise RuntimeError(f"hook '{name}' has changed the type of value (was {was} got {got})")
        return self._of_kind(changed, place.is_virtual)

    def _place(self, tensor: Any) -> _Where | None:
        """Return where a tensor is, on the host or a GPU; None if elsewhere, without elements or no plain tensor."""
        if type(tensor) not in _PLAIN:
            return None
        with torch.DisableTorchFunction():
            if not tensor.numel():
                return None
            device = self._machine.device_of(tensor)
            return _Where(device, tensor.is_meta) if device == HOST or is_gpu(device) else None

    def _handed(self, gradient: Any, place: _Where | None, said: str) -> Any:
        """`gradient` for a tensor that is at `place`, as torch/csrc/autograd/engine.cpp (`validate_outputs`) takes it.

        Raises:
            RuntimeError: it is on another device, and not of one element without dimensions, which the engine moves.
        """
        own = self._place(gradient)
        if place is None or own is None:
            return gradient
        if own.device != place.device:
            if gradient.dim():
                raise RuntimeError(f"{said} - expected device {place.device} but got {own.device}")
            gradient = self._move(gradient, place.device)
        return self._of_kind(gradient, place.is_virtual)


def _by_position(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a Function, of which each has a gradient."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _follows_real(values: Any) -> bool:
    """Return whether autograd follows one of these that has data."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta and value.requires_grad and value.dim():
                return True
        elif isinstance(value, (list, tuple)) and _follows_real(value):
            return True
    return False
