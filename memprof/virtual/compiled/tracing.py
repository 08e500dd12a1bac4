"""Fake tensors of the GPU: on CUDA for Python and for the dispatcher, on meta for what C++ asks of a device.

A build for the CPU has no streams that the autograd engine could ask for when it traces a backward pass on CUDA
tensors. It asks by a tensor's device; autocast, dropout and other choices of C++ go by the dispatch keys.
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
from memprof.virtual.function_mode import OwnFunctionMode
from memprof.virtual.integrations import python_functions
from memprof.virtual.kernels import registry

_META = torch.device("meta")
_CPU = torch.device("cpu")
_device_in_c: Callable[[torch.Tensor], torch.device] = tensors.TensorBase.device.__get__


def patches(machine: DeviceState) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) by which virtual tensors are traced as those of the GPU."""
    make, wrap = tensors.make_subclass.get(), tensors.make_wrapper_subclass.get()
    fake, new = dynamo.FakeTensor.get(), dynamo.new_fake_tensor.get()
    functional, inside = dynamo.FunctionalTensor.get(), dynamo.from_functional_tensor.get()
    describe, layout = dynamo.describe_tensor.get(), dynamo.TensorMeta.get()

    def make_subclass(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if keys is not None and keys.type == "cuda":
            kwargs["dispatch_device"] = False
        return make(cls, data, require_grad, **kwargs)

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = wrap(cls, *args, **kwargs)
        if cls is not functional or _device_in_c(made) != _META:
            return made
        # Its own class would be requested the copy, and know of no functionalization yet.
        with dispatch.DisableTorchDispatch():
            return make(cls, made, made.requires_grad, device_for_backend_keys=torch.device(machine.gpus.named()))

    def relabelled(cls: Any, fake_mode: Any, elem: Any, *args: Any, **kwargs: Any) -> Any:
        # C++ makes tensors beside those that it is given, which it believes on meta.
        gpu = torch.device(machine.gpus.named())
        args = tuple(gpu if arg == _META else arg for arg in args)
        kwargs = {name: gpu if value == _META else value for name, value in kwargs.items()}
        return new(cls, fake_mode, elem, *args, **kwargs)

    def describe_tensor(describer: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        made = describe(describer, tensor, **kwargs)
        if type(tensor) is not fake and tensor.is_meta:
            believed = machine.device_of(tensor)
            if believed != "meta":
                object.__setattr__(made, "device", torch.device(believed))
        return made

    def tensor_meta(*args: Any, **kwargs: Any) -> Any:
        if dispatch.get_dispatch_mode(dispatch.TorchDispatchModeKey.FAKE) is None and _is_cuda(kwargs.get("device")):
            kwargs["device"] = _META
        return layout(*args, **kwargs)

    yield inductor.deduce_value.patch(_on_host(inductor.deduce_value.get()))
    yield dynamo.TensorMeta.patch(tensor_meta)
    for mode in (dynamo.FunctionalTensorMode.get(), proxy_tensor.ProxyTorchDispatchMode):
        yield mode, "__torch_dispatch__", _naming_gpu(mode.__torch_dispatch__, machine)
    yield dynamo.device_of_functional_tensor.patch(property(lambda tensor: inside(tensor.elem).device))
    yield dynamo.is_meta_of_functional_tensor.patch(property(lambda tensor: inside(tensor.elem).is_meta))
    yield tensors.make_wrapper_subclass.patch(staticmethod(make_wrapper))
    yield tensors.make_subclass.patch(staticmethod(make_subclass))
    yield dynamo.new_fake_tensor.patch(staticmethod(relabelled))
    yield dynamo.describe_tensor.patch(describe_tensor)
    yield dynamo.is_meta_of_fake_tensor.patch(property(lambda fake: fake.device.type == "meta"))
    yield dynamo.init_gpu_context.patch(lambda *device: None)
    yield dynamo.avoid_device_init.patch(True)
    yield dynamo.ensure_cuda_device_guard_set.patch(lambda: None)


def _naming_gpu(dispatch: Callable[..., Any], machine: DeviceState) -> Callable[..., Any]:
    """C++ asks for new tensors on the device of a traced one, which it believes on meta: that is the GPU."""

    def on_gpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device(machine.gpus.named())}
        if any(arg == _META for arg in args if isinstance(arg, torch.device)):
            gpu = torch.device(machine.gpus.named())
            args = tuple(gpu if isinstance(arg, torch.device) and arg == _META else arg for arg in args)
        return dispatch(mode, func, types, args, kwargs)

    return on_gpu


class _OnHost(TorchDispatchMode):
    """Computes on the host what is asked of the GPU: constants of a few elements that passes over a graph look at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda value: _CPU if _is_cuda(value) else value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_host(deduce: Callable[..., Any]) -> Callable[..., Any]:
    def _deduce_value(folder: Any, node: torch.fx.Node) -> Any:
        with _OnHost():
            return deduce(folder, node)

    return _deduce_value


class Choices(OwnFunctionMode):
    """Choices that C++ makes by device above all operators, made as on the GPU: autocast's casts, and kernels/'s."""

    def __init__(self, machine: DeviceState) -> None:
        super().__init__()
        self._composites = registry.composites(machine)
        self._autocast = Autocast(machine.is_on_gpu)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = self._autocast.cast(func, args, kwargs)
        return self._composites.get(func, func)(*args, **kwargs)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Inside, functions run on traced tensors as on the GPU's."""
        with PatchSet() as patches:
            patches.set_all(python_functions.python_function_patches())
            patches.set(torch.Tensor, "to", _staying(torch.Tensor.to))
            try:
                with self:
                    yield
            finally:
                self._autocast.clear_cache()


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _staying(to: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` by which a number that is known while a graph is traced stays where it can be read."""

    def stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is torch.Tensor and tensor.is_cpu and any(map(_is_cuda, (*args, *kwargs.values()))):
            return tensor
        return to(tensor, *args, **kwargs)

    return stay
