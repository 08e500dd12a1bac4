"""The function mode: makes meta tensors look like `cuda:0` to Python code, and sends requests for CUDA to meta.

Property reads (`t.device`, `t.is_cuda`) are answered with the device that the program believes in; device arguments
that name CUDA become meta, and the allocation tracker is told what was asked for. Composite functions whose choices C++
makes by device before any dispatch mode sees them are chosen in kernels/.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private import autograd, dispatch, kernels, tensors
from memprof.torch_private.dispatch import disable_current_modes
from memprof.trace.events import HOST, card_index, is_card
from memprof.virtual.autocast import Autocast
from memprof.virtual.calls import in_place, tensors_of
from memprof.virtual.edges.interchange import Interchange
from memprof.virtual.host_kinds import HostKinds
from memprof.virtual.kernels import registry
from memprof.virtual.machine import Machine
from memprof.virtual.mixed import RECURRENT, MixedDevices
from memprof.virtual.torch_cuda.driver import legacy_name, legacy_type
from memprof.watch.failure import empty_frames
from memprof.watch.wrappers import has_memory, unwrapped

_Tensor = torch.Tensor
_SCRIPTED = (
    "TorchScript runs operator by operator. On a card it joins operators on single elements into kernels (NNC) from "
    "the second or third call on, and what is between them is not kept then."
)
_META = torch.device("meta")
_CPU = torch.device("cpu")
_CUDA_KERNEL = torch.DispatchKeySet(torch.DispatchKey.CUDA)
_aten = torch.ops.aten
_NoTorchFunction = torch.DisableTorchFunction
_autocast_enabled = torch.is_autocast_enabled
_default: Any = dispatch.default_device.get()


class _Devices(dict[str, torch.device]):
    def __missing__(self, name: str) -> torch.device:
        device = self[name] = torch.device(name)
        return device


_DEVICES = _Devices()


class DeviceMode(TorchFunctionMode):
    """Answers for the virtual GPU at the level of torch functions."""

    def __init__(self, tracker: Machine, composites: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._tracker = tracker
        self.autocast = Autocast(lambda tensor: is_card(self._believed(tensor)))
        self.interchange = Interchange(tracker, self._to, tracker.values.assume, self)
        self.kinds = HostKinds(tracker, self._given)
        self._mixed = MixedDevices(tracker, self._believed, self._to, self.kinds)
        self.is_off = False
        """In a forked child: what is asked is done as without this mode."""
        self._cuda_operators: list[Any] = []
        self._float32_operators: list[Any] = []
        """Operators of libraries that were registered for this run."""
        self._factories = dispatch.device_constructors()
        chosen = {func: self._choosing(choose) for func, choose in composites.items()}
        self._handlers: dict[Any, Callable[..., Any]] = {
            **{func: func for func in _MAKES_NOTHING},
            **chosen,
            **{
                func: functools.partial(self._mixed.recurrent, f"aten.{name}", chosen.get(func, func))
                for name, func in RECURRENT.items()
            },
            _Tensor.device.__get__: self._device,  # type: ignore[attr-defined]
            _Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            _Tensor.is_cpu.__get__: self._is_cpu,  # type: ignore[attr-defined]
            _Tensor.is_meta.__get__: self._is_meta,  # type: ignore[attr-defined]
            _Tensor.get_device: self._get_device,
            _Tensor.type: self._type,
            _Tensor.to: self._to,
            _Tensor.type_as: self._to,
            _Tensor.cuda: self._to_cuda,
            _Tensor.cpu: self._to_cpu,
            **self.interchange.handlers(),
            _Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            _Tensor.grad.__set__: self._set_grad,  # type: ignore[union-attr]
            _Tensor.__getitem__: self._choosing(self._getitem),
            _Tensor.__setitem__: self._setitem,
            kernels.parse_to: _parse_to,
            torch.device: self._make_device,
            **{func: functools.partial(self._sparse, func) for func in _MAKE_SPARSE},
            torch.tensor: self._tensor,
            torch.as_tensor: self._as_tensor,
            torch.asarray: self._as_tensor,
            _Tensor.new_tensor: self._new_tensor,
            _Tensor.new: self._new,
            _Tensor.copy_: self._copy_,
            **{func: functools.partial(self._nonfinite, func) for func in _NONFINITE},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        try:
            if types and dispatch.is_torch_function_enabled():
                answers = [kind for kind in types if issubclass(kind, _Tensor) and _answers(kind)]
                for kind in answers:
                    # What a subclass then calls is the program's own, under this mode.
                    with self:
                        result = kind.__torch_function__(func, types, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
                if answers:
                    return func(*args, **(kwargs or {}))  # they refuse again, in torch's words
            if _autocast_enabled("cuda"):
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
                self.interchange.note_pinned(result)
                return result
            if device is None and func in self._factories:
                # `with torch.device("cuda")` and torch.set_default_device act below this mode, too late to redirect.
                device = _default.CURRENT_DEVICE
            if device is not None:
                wanted = torch.device(device) if isinstance(device, str) else device
                if isinstance(wanted, int) or wanted.type == "cuda":
                    kwargs = {**(kwargs or {}), "device": _META}
                    for name in ("pin_memory", "generator"):  # neither goes with meta tensors
                        kwargs.pop(name, None)
                    return self._on(self._tracker.cards.named(wanted), func, args, kwargs)
                if wanted.type == "meta":
                    result = self._on("meta", func, args, {**(kwargs or {}), "device": _META})
                    for tensor in tensors_of(result):
                        if not tensor.numel():
                            self._tracker.recorder.storages.uncounted[tensor.untyped_storage()] = "meta"
                    return result
            for position, arg in enumerate(args):
                if type(arg) is torch.device and arg.type == "cuda":
                    card = self._tracker.cards.named(arg)
                    return self._on(card, func, (*args[:position], _META, *args[position + 1 :]), kwargs or {})
            if len(args) > 1 and isinstance(args[1], _Tensor) and args[1].requires_grad and in_place(func):
                args = self._mixed.writable(func, args, kwargs or {})
            return self._run(func, args, kwargs or {})
        except BaseException as error:
            empty_frames(error)
            args = kwargs = arg = result = tensor = None
            raise

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func`, and again with all tensors on the GPU if it mixed devices and cannot go on so."""
        args, kwargs = self.kinds.alike(func, args, kwargs)
        tracker = self._tracker
        mismatches = tracker.recorder.trace.mismatches
        before = len(mismatches)
        try:
            # As `MixedDevices.inside` does, which would be one more frame below every operator.
            outer, tracker.calling = tracker.calling, args
            try:
                result = func(*args, **kwargs)
            finally:
                tracker.calling = outer
        except RuntimeError as error:
            if not self._mixed.is_mismatch(error, func, args, kwargs, noted=len(mismatches) > before):
                raise
            numbers = True
        else:
            # On the way back the host tensor would be given a gradient on the GPU.
            if len(mismatches) == before or in_place(func) or not any(t.requires_grad for t in tensors_of(result)):
                return result
            del result
            numbers = False
        return self._mixed.run_moved(func, args, kwargs, numbers=numbers)

    def of_thread(self, tracker: Machine) -> DeviceMode:
        """The function mode of another thread, whose dispatch mode is `tracker`."""
        mode = DeviceMode(tracker, registry.composites(tracker))
        mode.interchange.share(self.interchange)
        mode.run_cuda_kernels_of(self._cuda_operators)
        mode.run_in_float32(self._float32_operators)
        return mode

    def run_cuda_kernels_of(self, operators: Iterable[Any]) -> None:
        """For tensors on the card, run what is registered for CUDA of these operators, which is Python code."""
        for operator in operators:
            self._cuda_operators.append(operator)
            run = functools.partial(self._run_cuda_kernel, operator)
            self._handlers[operator] = run
            if operator._overloadname == "default":
                self._handlers[operator.overloadpacket] = run

    def run_in_float32(self, operators: Iterable[Any]) -> None:
        """Autocast runs these operators of a library in float32, and gives what the first tensor was of."""
        for operator in operators:
            self._float32_operators.append(operator)
            self._handlers[operator] = self._handlers[operator.default] = functools.partial(self._in_float32, operator)

    def _in_float32(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not _autocast_enabled("cuda"):
            return self._run(operator, args, kwargs)
        given = tensors_of([*args, *kwargs.values()])[0].dtype
        args, kwargs = self.autocast.in_float32(args, kwargs)
        with self, torch.autocast("cuda", enabled=False):
            result = operator(*args, **kwargs)
            several = isinstance(result, tuple)
            made = tuple(one.to(given) if one.is_floating_point() or several else one for one in tensors_of(result))
        return made if several else made[0]

    def _run_cuda_kernel(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of([*args, *kwargs.values()])
        with self:
            if any(is_card(self._believed(tensor)) for tensor in tensors):
                return operator.redispatch(_CUDA_KERNEL, *args, **kwargs)
        return operator(*args, **kwargs)

    def _choosing(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        """A composite's choice, made again with all tensors on the card if it mixed devices."""
        return lambda *args, **kwargs: self._run(choose, args, kwargs)

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`p.data = p.data.cuda()` changes the very tensor; between a real and a virtual one only a swap can."""
        with _NoTorchFunction():
            if tensor.is_meta == value.is_meta:
                tensor.data = value
                return
            other = value.detach().requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                # A module that moves its parameters puts the gradient's data into it next: it has to be there.
                with disable_current_modes():
                    other.grad = torch.empty_like(other)
            # Class and attributes stay, and hooks that are set anew. So does what a graph has saved of the old one
            # (`weight_norm` makes one when the model is built), for which torch.utils.swap_tensors would refuse.
            tensors.swap_tensor_impl(tensor, other)
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(tensor, hooks, getattr(tensor, hooks))

    def _set_grad(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """A gradient has data where its tensor has: small tensors on the host may have, whatever came from the card.

        Raises:
            RuntimeError: it is on another device, in the words of torch/csrc/autograd/python_variable.cpp.
        """
        with _NoTorchFunction():
            if isinstance(value, _Tensor) and value.dtype == tensor.dtype:
                was, got = self._device(tensor).type, self._device(value).type
                if was != got:
                    raise RuntimeError(
                        f"attempting to assign a gradient with device type '{got}' to a tensor with device type "
                        f"'{was}'. Please ensure that the gradient and the tensor are on the same device"
                    )
            if isinstance(value, _Tensor) and value.is_meta != tensor.is_meta and self._believed(tensor) == HOST:
                value = self._as_real_as(tensor, value)
            tensor.grad = value

    def _as_real_as(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            for name, part in parts.items():
                if isinstance(part, _Tensor):
                    parts[name] = self._as_real_as(getattr(tensor, name), part)
            made: torch.Tensor = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
                parts, context, value.size(), value.stride()
            )
            return made
        if value.is_meta == tensor.is_meta:
            return value
        if value.layout is not torch.strided:
            return self.kinds.like(value, tensor)
        if value.is_meta:
            return self.interchange.read(value).clone()
        with disable_current_modes():
            virtual = torch.empty_like(value, device=_META)
        place = self._tracker.recorder.attribution.place(sys._getframe(1))
        self._tracker.record([virtual], "aten.clone", place, HOST)
        if self._tracker.values.store.is_trackable(virtual):
            self._tracker.values.store.set(virtual, value)
        return virtual

    def shares_data(self, original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        """The replacement for `torch._has_compatible_shallow_copy_type`, by which a module moved to the card decides
        whether its parameters stay the same objects: between host and card they do, also if only one is virtual. Those
        of a scripted module are held by C++, which has to be given the new ones."""

        def compatible(tensor: torch.Tensor, other: torch.Tensor) -> bool:
            moving = sys._getframe(1).f_back  # nn.Module._apply, which asks through a function of its own
            if moving is not None and isinstance(moving.f_locals.get("self"), torch.jit.ScriptModule):
                self._tracker.values.assume(_SCRIPTED)
                return original(tensor, other)
            with _NoTorchFunction():
                one_is_virtual = tensor.is_meta != other.is_meta
                believed = {self._tracker.device_of(tensor), self._tracker.device_of(other)}
            return (one_is_virtual and "meta" not in believed) or original(tensor, other)

        return compatible

    def _on(self, device: str, func: Any, args: Any, kwargs: Any) -> Any:
        with self._tracker.asked_for(device):
            return func(*args, **kwargs)

    def _make_device(self, *args: Any, **kwargs: Any) -> torch.device:
        """A bare index is an index of CUDA devices."""
        if len(args) == 1 and not kwargs and isinstance(args[0], int):
            return torch.device("cuda", args[0])
        return torch.device(*args, **kwargs)

    # -- tensors from data ------------------------------------------------------------------------------------------

    def _tensor(
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
    ) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            target = self._device(data) if device is None else device
            result = self._to(data.detach(), target, dtype, copy=True)
            return result.requires_grad_() if requires_grad else result
        try:
            result = torch.tensor(data, dtype=dtype, device=_CPU)
        except (RuntimeError, TypeError):
            result = torch.tensor(self._plain(data), dtype=dtype, device=_CPU)  # of a list that holds tensors
        result = self._placed(result, device)
        if pin_memory:
            self.interchange.note_pinned(result)
        # Functions that torch.func transforms may make tensors, and not call requires_grad_.
        return result.requires_grad_() if requires_grad else result

    def _plain(self, data: Any) -> Any:
        """Data with the numbers of the tensors in it."""
        if isinstance(data, torch.Tensor):
            return self.interchange.read(data).tolist()
        return [self._plain(part) for part in data] if isinstance(data, (list, tuple)) else data

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return self._to(data, self._device(data) if device is None else device, dtype)
        return self._placed(torch.as_tensor(data, dtype=dtype, device=_CPU), device)

    def _new_tensor(
        self, tensor: torch.Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        target = self._device(tensor) if device is None else device
        return self._tensor(data, dtype=dtype or tensor.dtype, device=target, requires_grad=requires_grad)

    def _new(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of numbers, if it is given any; of indices and values, if `tensor` is sparse; else of a shape."""
        if tensor.layout is torch.sparse_coo and args:
            return torch.sparse_coo_tensor(*args, dtype=tensor.dtype, check_invariants=False)
        if args and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return self._new_tensor(tensor, args[0], **kwargs)
        made: torch.Tensor = self._mixed.inside(_Tensor.new, (tensor, *args), kwargs)
        return made

    def _sparse(self, func: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """A sparse tensor of indices and values, which have to be of one kind. Those that are tensors are moved to
        `device` if one is named, values first (utils/tensor_new.cpp)."""
        device = _default.CURRENT_DEVICE if device is None else self._make_device(device)
        if device is None:
            return self._run(func, *self.kinds.all_virtual((args, kwargs)))
        parts: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = [name for name, part in parts.items() if isinstance(part, _Tensor)]
        for name in tensors[-1:] + tensors[:-1]:
            parts[name] = self._to(parts[name], device)
        args, kwargs = self.kinds.all_virtual(
            ([parts[index] for index in range(len(args))], {n: parts[n] for n in kwargs})
        )
        virtual = device.type != HOST or any(map(self._tracker.is_virtual, tensors_of([*args, *kwargs.values()])))
        wanted = self._tracker.cards.named(device) if device.type == "cuda" else device.type
        return self._on(wanted, func, args, {**kwargs, "device": _META if virtual else _CPU})

    def _placed(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """A tensor just made on the host, on the device that was asked for."""
        if device is None:
            device = _default.CURRENT_DEVICE
        return tensor if device is None else self._to(tensor, device)

    def _getitem(self, tensor: torch.Tensor, index: Any) -> Any:
        if _has_list(index):
            index = self._indices(tensor, index)
        return _Tensor.__getitem__(tensor, index)

    def _indices(self, tensor: torch.Tensor, index: Any) -> Any:
        """Lists of numbers in an index become tensors beside `tensor` (python_variable_indexing.cpp,
        sequenceToVariable), which C++ would make where no mode sees them."""
        if isinstance(index, tuple):
            return tuple(self._indices(tensor, part) if type(part) is list else part for part in index)
        if not index or not all(type(part) in (int, bool) for part in index):
            return index
        return self._to(torch.tensor(index, device=_CPU), self._device(tensor))

    def _setitem(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        if _has_list(index):
            index = self._indices(tensor, index)
        if isinstance(value, (bool, int, float)) and is_card(self._believed(tensor)):
            # For a CUDA tensor the number stays on the host (torch/csrc/autograd/python_variable_indexing.cpp).
            value = torch.tensor(value, dtype=tensor.dtype, device=_CPU)
        elif isinstance(value, _Tensor) and value.requires_grad and torch.is_grad_enabled():
            value = self._mixed.assignable(tensor, index, value)
            if self._believed(tensor) == HOST == self._believed(value):
                value = self.kinds.like(value, tensor)
        _Tensor.__setitem__(tensor, index, value)

    def _nonfinite(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Unknown numbers are finite (values/policy.py): composites would compare them first, and lose that."""
        result: torch.Tensor = func(tensor)
        values = self._tracker.values
        with _NoTorchFunction(), disable_current_modes():
            if result.is_meta and values.store.get(tensor.detach()) is None:
                values.store.set_uniform(result, _NONFINITE[func])
        return result

    # -- what a tensor says of itself -------------------------------------------------------------------------------

    def _believed(self, tensor: torch.Tensor) -> str:
        with _NoTorchFunction():
            return self._tracker.device_of(tensor)

    def _device(self, tensor: torch.Tensor) -> torch.device:
        with _NoTorchFunction():
            tensor = unwrapped(tensor)
            if not tensor.is_meta:
                return tensor.device
            believed = self._tracker.device_of(tensor)
        return _DEVICES[believed]

    def _is_cuda(self, tensor: torch.Tensor) -> bool:
        return is_card(self._believed(tensor))

    def _is_cpu(self, tensor: torch.Tensor) -> bool:
        return self._believed(tensor) == HOST

    def _is_meta(self, tensor: torch.Tensor) -> bool:
        return self._believed(tensor) == "meta"

    def _get_device(self, tensor: torch.Tensor) -> int:
        believed = self._believed(tensor)
        return card_index(believed) if is_card(believed) else -1

    def _type(self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return legacy_name(tensor.dtype, on_card=is_card(self._believed(tensor)))
        named = legacy_type(dtype)
        return _Tensor.type(tensor, dtype, non_blocking) if named is None else self._to(tensor, *named)

    # -- moves ------------------------------------------------------------------------------------------------------

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
        if other is not None:
            device: Any = self._device(other)
            dtype: Any = other.dtype
            rest = {name: kwargs[name] for name in ("copy", "memory_format") if name in kwargs}
            copy = kwargs.get("copy", False)
            non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
        else:
            # Two flags by position are non_blocking and copy, and torch's parser does not take the second.
            both = len(args) > 1 and isinstance(args[-1], bool) and isinstance(args[-2], bool)
            copy = args[-1] if both else bool(kwargs.get("copy", False))
            device, dtype, non_blocking, memory_format = _parse_to(
                *(args[:-1] if both else args), **{name: value for name, value in kwargs.items() if name != "copy"}
            )
            rest = {"memory_format": memory_format} if memory_format is not None else {}
        believed = self._believed(tensor)
        if device is None:
            wanted = believed
        else:
            other = "meta" if device.type == "meta" else HOST
            wanted = self._tracker.cards.named(device) if device.type == "cuda" else other
        dtype = dtype or tensor.dtype
        if wanted == believed and dtype == tensor.dtype and not copy and not rest.get("memory_format"):
            return tensor
        if wanted == believed:
            # No move: torch does it, on whatever the tensor really is.
            return _Tensor.to(tensor, dtype, copy=copy, **{k: v for k, v in rest.items() if k != "copy"})
        device_argument = _CPU if wanted == HOST else _META
        kwargs = {"memory_format": rest["memory_format"]} if rest.get("memory_format") is not None else {}
        if non_blocking:
            kwargs["non_blocking"] = True
        return self._copied(tensor, believed, wanted, dtype=dtype, device=device_argument, **kwargs)

    def _copied(self, tensor: torch.Tensor, believed: str, wanted: str, **kwargs: Any) -> torch.Tensor:
        """A copy on another device, whose gradient finds its way back."""
        made: torch.Tensor = self._on(wanted, _aten._to_copy.default, (tensor,), kwargs)
        if made.grad_fn is not None and made.is_meta and tensor.is_meta and "meta" not in (believed, wanted):
            made.grad_fn.register_hook(self._sending_back(believed))
        return made

    def _to_cuda(self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self._to(tensor, "cuda" if device is None else device, non_blocking=non_blocking, **kwargs)

    def _sending_back(self, device: str) -> Callable[..., Any]:
        """A hook on a copy from one device to another: the gradient goes where the copied tensor is. C++ compares the
        devices that it knows of, which are both meta."""

        def send(inputs: Any, outputs: Any) -> Any:
            with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self:
                return tuple(None if gradient is None else self._sent(gradient, device) for gradient in inputs)

        return send

    def _given(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """`gradient` on the device that the engine wants it on; whichever function runs, this mode sees it."""
        with contextlib.nullcontext() if dispatch.len_torch_function_stack() else self:
            return gradient.to(device)

    def _sent(self, gradient: torch.Tensor, device: str) -> torch.Tensor:
        """The gradient of a virtual tensor on `device`, which is as virtual."""
        believed = self._believed(gradient)
        if device != HOST or believed == HOST:
            return gradient.to(device)
        with _NoTorchFunction():
            return self._copied(gradient, believed, HOST, device=_META)

    def _copy_(self, tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Between cards, the source is moved first where it needs a gradient, which then finds its way back."""
        several = self._tracker.cards.several
        if several and isinstance(source, _Tensor) and source.requires_grad and torch.is_grad_enabled():
            ends = self._believed(source), self._believed(tensor)
            if ends[0] != ends[1] and all(map(is_card, ends)):
                source = self._to(source, ends[1])
        elif isinstance(source, _Tensor) and source.requires_grad and self._believed(tensor) == self._believed(source):
            source = self.kinds.like(source, tensor)
        with _NoTorchFunction():
            is_wrapper = tensor.is_cuda  # as a subclass has itself made; the method would take a guard of that card
        copy = _aten.copy_.default if is_wrapper else _Tensor.copy_
        return self._run(copy, (tensor, source, non_blocking), {})

    def _to_cpu(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        return self._to(tensor, _CPU, **kwargs)

    # -- reads ------------------------------------------------------------------------------------------------------

    def repr_of(self, original: Callable[..., str]) -> Callable[..., str]:
        """The replacement for `torch._tensor_str._str`, which takes all modes off before it looks at the data."""

        def _str(tensor: torch.Tensor, **kwargs: Any) -> str:
            with _NoTorchFunction():
                virtual = has_memory(tensor) and tensor.is_meta
                device = self._tracker.device_of(tensor) if virtual else "meta"
                if device == "meta":
                    return original(tensor, **kwargs)
                known = self._tracker.values.store.get(tensor.detach())
                if known is None and tensor.dim() == 0:
                    known = self.interchange.read(tensor)
                kind = type(tensor) if type(tensor) is not torch.nn.Parameter else _Tensor  # torch says "tensor" of it
                if known is None:
                    name = "tensor" if kind is _Tensor else kind.__name__
                    return f"{name}(..., device='{device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"
                return f"{original(known.as_subclass(kind), **kwargs)[:-1]}, device='{device}')"

        return _str

    def grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for `torch._C._group_tensors_by_device_and_dtype`, whose groups name their device.

        Optimizers and gradient clipping choose by it the operators on whole lists. What is all "meta" may be of two
        devices, and tensors of the host may be real or virtual.
        """

        def group(tensor_lists: Any, with_indices: bool = False) -> Any:
            groups: dict[Any, Any] = {}
            for (_, dtype), (lists, indices) in original(tensor_lists, with_indices).items():
                for column, tensor in enumerate(lists[0]):
                    key = (self._device(tensor), dtype)
                    if key not in groups:
                        groups[key] = ([[] for _ in lists], [])
                    parts, numbers = groups[key]
                    for part, members in zip(parts, lists, strict=True):
                        if members:
                            part.append(members[column])
                    if indices:
                        numbers.append(indices[column])
            return groups

        return group


def _has_list(index: Any) -> bool:
    return type(index) is list or (type(index) is tuple and any(type(part) is list for part in index))


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """The arguments of a `.to()`; a bare index is an index of CUDA devices."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device("cuda", args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = torch.device("cuda", kwargs["device"])
    return kernels.parse_to(*args, **kwargs)


@functools.cache
def _answers(kind: type) -> bool:
    """Whether a tensor class has a `__torch_function__` in Python, its own or what Tensor has for subclasses; that of a
    parameter is in C, and does nothing."""
    return kind is not _Tensor and hasattr(kind.__torch_function__, "__func__")  # type: ignore[attr-defined]


_MAKE_SPARSE = (
    *(torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor),
    *(torch.sparse_bsr_tensor, torch.sparse_bsc_tensor, torch.sparse_compressed_tensor),
)
_MAKES_NOTHING: frozenset[Any] = frozenset(
    {
        *(value.__get__ for value in vars(tensors.TensorBase).values() if isinstance(value, GetSetDescriptorType)),
        *(_Tensor.dim, _Tensor.size, _Tensor.stride, _Tensor.numel, _Tensor.element_size, _Tensor.is_contiguous),
        *(_Tensor.is_floating_point, _Tensor.is_complex, torch.is_floating_point, torch.is_complex),
        autograd.set_grad_enabled,
    }
)
"""What only asks; half of what a program calls. An attribute may be a view."""
_NONFINITE: dict[Any, bool] = {
    torch.isfinite: True,
    _Tensor.isfinite: True,
    torch.isnan: False,
    _Tensor.isnan: False,
    torch.isinf: False,
    _Tensor.isinf: False,
}
