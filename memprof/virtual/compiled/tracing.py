"""Fake tensors of the GPU: on CUDA for Python and the dispatcher, on meta for C++ code that reads the device.

A CPU build of torch has no CUDA streams, which the autograd engine would query for a backward pass on CUDA tensors. The
engine reads a tensor's device; autocast, dropout and other choices in C++ depend on the dispatch keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.fx.experimental import proxy_tensor

from memprof.patching import PatchSet
from memprof.torch_private import dispatch, dynamo, inductor, tensors
from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.torch_private.pytree import tree_map
from memprof.virtual.autocast import Autocast
from memprof.virtual.device_state import DeviceState
from memprof.virtual.function_mode import MemprofFunctionMode
from memprof.virtual.integrations import python_functions
from memprof.virtual.kernels import registry

_META = torch.device("meta")
_CPU = torch.device("cpu")
_get_cpp_device: Callable[[torch.Tensor], torch.device] = tensors.TensorBase.device.__get__


def patches(device_state: DeviceState) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) by which virtual tensors are traced as CUDA tensors."""
    original_subclass, original_wrapper = tensors.make_subclass.get(), tensors.make_wrapper_subclass.get()
    fake_class, original_new_fake = dynamo.FakeTensor.get(), dynamo.new_fake_tensor.get()
    functional_class, unwrap_functional = dynamo.FunctionalTensor.get(), dynamo.from_functional_tensor.get()
    original_describe, original_meta = dynamo.describe_tensor.get(), dynamo.TensorMeta.get()

    def make_subclass(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if keys is not None and keys.type == "cuda":
            kwargs["dispatch_device"] = False
        return original_subclass(cls, data, require_grad, **kwargs)

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original_wrapper(cls, *args, **kwargs)
        if cls is not functional_class or _get_cpp_device(result) != _META:
            return result
        # The class's own dispatch would handle the copy, before functionalization is set up.
        with dispatch.DisableTorchDispatch():
            return original_subclass(
                cls, result, result.requires_grad, device_for_backend_keys=torch.device(device_state.gpus.get_name())
            )

    def make_fake_tensor(cls: Any, fake_mode: Any, elem: Any, *args: Any, **kwargs: Any) -> Any:
        # C++ also makes tensors on the device of its inputs, which is meta for C++.
        gpu = torch.device(device_state.gpus.get_name())
        args = tuple(gpu if arg == _META else arg for arg in args)
        kwargs = {name: gpu if value == _META else value for name, value in kwargs.items()}
        return original_new_fake(cls, fake_mode, elem, *args, **kwargs)

    def describe_tensor(describer: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        result = original_describe(describer, tensor, **kwargs)
        if type(tensor) is not fake_class and tensor.is_meta:
            device = device_state.device_of(tensor)
            if device != "meta":
                object.__setattr__(result, "device", torch.device(device))
        return result

    def make_tensor_meta(*args: Any, **kwargs: Any) -> Any:
        if dispatch.get_dispatch_mode(dispatch.TorchDispatchModeKey.FAKE) is None and _is_cuda(kwargs.get("device")):
            kwargs["device"] = _META
        return original_meta(*args, **kwargs)

    yield inductor.deduce_value.patch(_wrap_deduce_value(inductor.deduce_value.get()))
    yield dynamo.TensorMeta.patch(make_tensor_meta)
    for mode_class in (dynamo.FunctionalTensorMode.get(), proxy_tensor.ProxyTorchDispatchMode):
        yield mode_class, "__torch_dispatch__", _wrap_torch_dispatch(mode_class.__torch_dispatch__, device_state)
    yield dynamo.device_of_functional_tensor.patch(property(lambda tensor: unwrap_functional(tensor.elem).device))
    yield dynamo.is_meta_of_functional_tensor.patch(property(lambda tensor: unwrap_functional(tensor.elem).is_meta))
    yield tensors.make_wrapper_subclass.patch(staticmethod(make_wrapper))
    yield tensors.make_subclass.patch(staticmethod(make_subclass))
    yield dynamo.new_fake_tensor.patch(staticmethod(make_fake_tensor))
    yield dynamo.describe_tensor.patch(describe_tensor)
    yield dynamo.is_meta_of_fake_tensor.patch(property(lambda tensor: tensor.device.type == "meta"))
    yield dynamo.init_gpu_context.patch(lambda *device: None)
    yield dynamo.avoid_device_init.patch(True)
    yield dynamo.ensure_cuda_device_guard_set.patch(lambda: None)


def _wrap_torch_dispatch(original_dispatch: Callable[..., Any], device_state: DeviceState) -> Callable[..., Any]:
    """Return a `__torch_dispatch__` that replaces meta, which C++ reads as the device of traced tensors, by the GPU."""

    def dispatch_on_gpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device(device_state.gpus.get_name())}
        if any(arg == _META for arg in args if isinstance(arg, torch.device)):
            gpu = torch.device(device_state.gpus.get_name())
            args = tuple(gpu if isinstance(arg, torch.device) and arg == _META else arg for arg in args)
        return original_dispatch(mode, func, types, args, kwargs)

    return dispatch_on_gpu


class _HostConstants(TorchDispatchMode):
    """Dispatch mode that computes on the CPU instead of the GPU, for constants that graph passes read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda value: _CPU if _is_cuda(value) else value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wrap_deduce_value(original_deduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `_deduce_value`, of Inductor's constant folder, that computes on the CPU."""

    def _deduce_value(folder: Any, node: torch.fx.Node) -> Any:
        with _HostConstants():
            return original_deduce(folder, node)

    return _deduce_value


class DeviceChoices(MemprofFunctionMode):
    """Function mode that replaces C++ choices that depend on the device: autocast, and composites of kernels/."""

    def __init__(self, device_state: DeviceState) -> None:
        super().__init__()
        self._composites = registry.make_composites(device_state)
        self._autocast = Autocast(device_state.gpus.type, device_state.is_on_gpu)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = self._autocast.cast(func, args, kwargs)
        return self._composites.get(func, func)(*args, **kwargs)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: functions on traced tensors run as on CUDA tensors."""
        with PatchSet() as patches:
            patches.apply_all(python_functions.patch_python_functions())
            patches.set(torch.Tensor, "to", _wrap_tensor_to(torch.Tensor.to))
            try:
                with self:
                    yield
            finally:
                self._autocast.clear_cache()


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _wrap_tensor_to(original_to: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Tensor.to` that does not move real CPU tensors to the GPU while a graph is traced."""

    def move_unless_known(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is torch.Tensor and tensor.is_cpu and any(map(_is_cuda, (*args, *kwargs.values()))):
            return tensor
        return original_to(tensor, *args, **kwargs)

    return move_unless_known
