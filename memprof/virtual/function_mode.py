"""The function mode: makes meta tensors look like `cuda:0` to Python code, and sends requests for the GPU to meta.

Property reads (`t.device`, `t.is_cuda`) return the device that the program believes in. Device arguments that name the
GPU ("cuda"; of other GPUs "mps" or "xpu") become meta, and the dispatch mode receives the requested device. Composite
functions, in which C++ chooses by device before a dispatch mode sees the call, have replacements in kernels/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private import autograd, dispatch, tensors
from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.assignments import Assignments
from memprof.virtual.autocast import Autocast
from memprof.virtual.device_answers import DeviceAnswers
from memprof.virtual.device_state import DeviceState
from memprof.virtual.interchange.interchange import Interchange
from memprof.virtual.kernels import registry
from memprof.virtual.mixed import RECURRENT, MixedDevices
from memprof.virtual.moves import Moves
from memprof.virtual.operator_call import find_tensors, is_in_place
from memprof.virtual.tensor_data import TensorsFromData
from memprof.watch.failure import clear_frames

_META = torch.device("meta")
_CUDA_KERNEL = torch.DispatchKeySet(torch.DispatchKey.CUDA)
_default_device: Any = dispatch.default_device.get()


class MemprofFunctionMode(TorchFunctionMode):
    """Base class of memprof's function modes, by which integrations/python_functions.py recognizes them."""


class FunctionMode(MemprofFunctionMode):
    """Function mode that runs torch functions on the virtual GPU; each attribute handles one kind of function."""

    def __init__(self, device_state: DeviceState) -> None:
        super().__init__()
        self._device_state, self._gpu_type = device_state, device_state.gpus.type
        self.device_answers = answers = DeviceAnswers(device_state)
        moves = Moves(device_state, answers, self, self._run)
        self.host_kinds = moves.host_kinds
        self._mixed_devices = mixed = MixedDevices(device_state, answers.get_device_name, moves.to, self.host_kinds)
        self.autocast = Autocast(device_state.gpus.type, device_state.is_on_gpu)
        self.interchange = Interchange(device_state, moves.to, self)
        read_values, mark_pinned = self.interchange.read_values, self.interchange.mark_pinned
        self.assignments = Assignments(device_state, answers, moves.to, mixed, self.host_kinds, read_values)
        from_data = TensorsFromData(device_state, answers, moves, mixed, self._run, read_values, mark_pinned)
        self.is_off = False  # in a forked child, where functions run as without this mode
        # Operators of libraries that were registered for this run.
        self._cuda_operators: list[Any] = []
        self._float32_operators: list[Any] = []
        self._factories = dispatch.device_constructors()
        composites = {
            func: self._wrap_composite(choose) for func, choose in registry.make_composites(device_state).items()
        }
        self._handlers: dict[Any, Callable[..., Any]] = {
            **{func: func for func in _READS_METADATA},
            **composites,
            **{
                func: functools.partial(mixed.run_recurrent, f"aten.{name}", composites.get(func, func))
                for name, func in RECURRENT.items()
            },
            torch.Tensor.__getitem__: self._wrap_composite(self.assignments.getitem),
            **{func: functools.partial(self._run_finiteness_test, func) for func in _NONFINITE},
        }
        for component in (answers, moves, self.interchange, self.assignments, from_data):
            self._handlers.update(component.handlers())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        try:
            if types and dispatch.is_torch_function_enabled():
                subclasses = [cls for cls in types if issubclass(cls, torch.Tensor) and _has_torch_function(cls)]
                for subclass in subclasses:
                    # The program's own `__torch_function__` runs under this mode.
                    with self:
                        result = subclass.__torch_function__(func, types, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
                if subclasses:
                    return func(*args, **(kwargs or {}))  # the subclass refuses again, with torch's error
            if torch.is_autocast_enabled(self._gpu_type):
                args, kwargs = self.autocast.cast(func, args, kwargs)
            handler = self._handlers.get(func)
            if handler is not None:
                return handler(*args, **(kwargs or {}))
            device = kwargs.get("device") if kwargs else None
            if (
                kwargs
                and kwargs.get("pin_memory")
                and func in self._factories
                and (device is None or "cpu" in str(device))
            ):
                result = func(*args, **{**kwargs, "pin_memory": False})
                self.interchange.mark_pinned(result)
                return result
            if device is None and func in self._factories:
                # `with torch.device("cuda")` and torch.set_default_device act below this mode, too late to redirect.
                device = _default_device.CURRENT_DEVICE
            if device is not None:
                target = torch.device(device) if isinstance(device, str) else device
                if isinstance(target, int) or target.type == self._gpu_type:
                    kwargs = {**(kwargs or {}), "device": _META}
                    for name in ("pin_memory", "generator"):  # meta tensors accept neither
                        kwargs.pop(name, None)
                    return self._call_on(self._device_state.gpus.get_name(target), func, args, kwargs)
                if target.type == "meta":
                    result = self._call_on("meta", func, args, {**(kwargs or {}), "device": _META})
                    for tensor in find_tensors(result):
                        if not tensor.numel():
                            self._device_state.recorder.storages.device_by_empty_storage[tensor.untyped_storage()] = (
                                "meta"
                            )
                    return result
            for index, arg in enumerate(args):
                if type(arg) is torch.device and arg.type == self._gpu_type:
                    gpu = self._device_state.gpus.get_name(arg)
                    return self._call_on(gpu, func, (*args[:index], _META, *args[index + 1 :]), kwargs or {})
            if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].requires_grad and is_in_place(func):
                args = self._mixed_devices.move_operands(func, args, kwargs or {})
            return self._run(func, args, kwargs or {})
        except BaseException as error:
            clear_frames(error)
            args = kwargs = arg = result = tensor = None
            raise

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of `func`; if it mixed host and GPU tensors, run it again with all tensors on the GPU."""
        args, kwargs = self.host_kinds.unify_kinds(func, args, kwargs)
        device_state = self._device_state
        mismatches = device_state.recorder.trace.mismatches
        before = len(mismatches)
        try:
            # The same as `MixedDevices.run_with_arguments`, which would add a frame below every operator.
            previous, device_state.current_arguments = device_state.current_arguments, args
            try:
                result = func(*args, **kwargs)
            finally:
                device_state.current_arguments = previous
        except RuntimeError as error:
            if not self._mixed_devices.is_mismatch(error, func, args, kwargs, is_recorded=len(mismatches) > before):
                raise
            with_scalars = True
        else:
            # The backward pass would give the host tensor a gradient on the GPU.
            if len(mismatches) == before or is_in_place(func) or not any(t.requires_grad for t in find_tensors(result)):
                return result
            del result
            with_scalars = False
        return self._mixed_devices.run_on_gpu(func, args, kwargs, with_scalars=with_scalars)

    def make_thread_mode(self, device_state: DeviceState) -> FunctionMode:
        """Return a function mode for another thread, whose dispatch mode is `device_state`."""
        mode = FunctionMode(device_state)
        mode.interchange.share_state(self.interchange)
        mode.register_cuda_kernels(self._cuda_operators)
        mode.register_float32_operators(self._float32_operators)
        return mode

    def register_cuda_kernels(self, operators: Iterable[Any]) -> None:
        """Register library operators whose CUDA kernels, written in Python, are to run for tensors on the GPU."""
        for operator in operators:
            self._cuda_operators.append(operator)
            run = functools.partial(self._run_cuda_kernel, operator)
            self._handlers[operator] = run
            if operator._overloadname == "default":
                self._handlers[operator.overloadpacket] = run

    def register_float32_operators(self, operators: Iterable[Any]) -> None:
        """Register library operators that run in float32 under autocast; results have the dtype of the first tensor."""
        for operator in operators:
            self._float32_operators.append(operator)
            self._handlers[operator] = self._handlers[operator.default] = functools.partial(self._run_float32, operator)

    def _run_float32(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self._gpu_type):
            return self._run(operator, args, kwargs)
        dtype = find_tensors([*args, *kwargs.values()])[0].dtype
        args, kwargs = self.autocast.cast_to(args, kwargs, torch.float32)
        with self, torch.autocast(self._gpu_type, enabled=False):
            result = operator(*args, **kwargs)
            is_tuple = isinstance(result, tuple)
            outputs = tuple(t.to(dtype) if t.is_floating_point() or is_tuple else t for t in find_tensors(result))
        return outputs if is_tuple else outputs[0]

    def _run_cuda_kernel(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = find_tensors([*args, *kwargs.values()])
        with self:
            if any(self._device_state.is_on_gpu(tensor) for tensor in tensors):
                return operator.redispatch(_CUDA_KERNEL, *args, **kwargs)
        return operator(*args, **kwargs)

    def _call_on(self, device: str, func: Any, args: Any, kwargs: Any) -> Any:
        with self._device_state.factory_device_as(device):
            return func(*args, **kwargs)

    def _wrap_composite(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler that runs `choose` by `_run`, which repeats it on the GPU if it mixed devices."""
        return lambda *args, **kwargs: self._run(choose, args, kwargs)

    def _run_finiteness_test(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of isfinite, isnan or isinf on `tensor`; unknown values are finite (values/policy.py)."""
        result: torch.Tensor = func(tensor)
        values = self._device_state.values
        with torch.DisableTorchFunction(), disable_current_modes():
            if result.is_meta and values.store.get(tensor.detach()) is None:
                values.store.set_uniform(result, _NONFINITE[func])
        return result


@functools.cache
def _has_torch_function(tensor_type: type) -> bool:
    """Return whether the tensor class has a `__torch_function__` in Python, its own or the one that Tensor has for
    subclasses; that of `torch.nn.Parameter` is in C, and does nothing."""
    return tensor_type is not torch.Tensor and hasattr(tensor_type.__torch_function__, "__func__")  # type: ignore[attr-defined]


# Functions that only read metadata: half of a program's calls. An attribute may be a view.
_READS_METADATA: frozenset[Any] = frozenset(
    {
        *(value.__get__ for value in vars(tensors.TensorBase).values() if isinstance(value, GetSetDescriptorType)),
        *(torch.Tensor.dim, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.element_size),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.is_complex),
        torch.Tensor.is_contiguous,
        autograd.set_grad_enabled,
    }
)
_NONFINITE: dict[Any, bool] = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **dict.fromkeys((torch.isnan, torch.Tensor.isnan, torch.isinf, torch.Tensor.isinf), False),
}
