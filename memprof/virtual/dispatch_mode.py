"""The dispatch mode: sees every operator below autograd, runs it on meta tensors, and records new storages.

The mode classifies each operator once (a view makes no storage, an in-place operator writes into one, the others
allocate). For each combination of input layouts it caches the output's layout (layout_cache.py), so that the second
layer of a model costs a fraction of the first.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.monitor.probe import no_gpu
from memprof.patching import PatchSet
from memprof.torch_private import dispatch
from memprof.torch_private.pytree import tree_map_only
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.cublas_workspaces import CublasWorkspaces
from memprof.virtual.device_checks import breaks_device_rule, resolve_mixed_devices, note_mismatch, choose_gpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import FILLS_ZEROS, called_by_engine, in_backward
from memprof.virtual.gpus import Gpus
from memprof.virtual.in_place import InPlaceOperators
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import inplace_backward_formulas as formulas
from memprof.virtual.kernels import quantized_tensors, sparse
from memprof.virtual.kernels.expansion import set_python_dispatch
from memprof.virtual.layout_cache import UNCACHED, maker_of
from memprof.virtual.limits import unsupported_error
from memprof.virtual.op_info import describe_operator
from memprof.virtual.operator_call import (
    MIN_VIRTUAL_HOST_BYTES,
    OVERWRITES,
    OperatorCall,
    OpInfo,
    OpKind,
    find_tensors,
    run_on_meta,
    written,
)
from memprof.virtual.values import Values
from memprof.virtual.values.unknown_values import UNINITIALIZED
from memprof.watch.caches import KVCacheDetector
from memprof.watch.failure import clear_frames
from memprof.watch.forward import CallSite
from memprof.watch.recorder import Recorder
from memprof.watch.updates import UpdateDetector
from memprof.watch.wrappers import get_sparse_parts

_META = torch.device("meta")
_OVERWRITES = OVERWRITES | {torch.ops.aten._foreach_zero_, torch.ops.aten._foreach_copy_}
_FACTORIES: dict[str, Any] = {name: getattr(torch, name) for name in ("empty", "zeros", "ones", "full")}


@contextlib.contextmanager
def _restore_factories() -> Iterator[None]:
    """Context manager: restore torch's own factories, which a program may have replaced (nanotron)."""
    with PatchSet() as patches:
        patches.apply_all((torch, name, factory) for name, factory in _FACTORIES.items())
        yield


class DispatchMode(DeviceState):
    """The dispatch mode that runs the program's operators on the virtual GPU."""

    def __init__(self, recorder: Recorder, values: Values, gpu: DeviceProperties, gpus: Gpus, workspaces: bool) -> None:
        super().__init__(recorder, values, gpu, gpus, workspaces)
        # Keyed by the `id` of the overload, which the OpInfo keeps alive: the overload's own hash is a Python function.
        self._operators: dict[int, OpInfo] = {}
        # Key of a call -> function that makes tensors like its outputs.
        self._makers: dict[Any, Callable[[], Any]] = {}
        self._in_place = InPlaceOperators()
        self._cublas = CublasWorkspaces()
        self.caches = KVCacheDetector(recorder)
        self.updates: UpdateDetector | None = None  # None: the workload has torch's optimizers alone
        # Autocast in a backward pass inside its region: no function mode sees the operators that the engine calls.
        self.cast: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
        self.is_off = False  # in a forked child, where operators run as without this mode
        self.function_mode: Any = contextlib.nullcontext()  # the mode under which an operator written in Python runs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps every call in a guard against torch.compile, which imports all of dynamo.
        return False

    # -- every operator ---------------------------------------------------------------------------------------------

    def _refuse_virtual(self, args: Any, kwargs: Any) -> None:
        """Raise an error for virtual tensors in a forked child, which has no virtual GPU."""
        for value in find_tensors([*args, *(kwargs or {}).values()]):
            if value.is_meta and self.device_of(value) != "meta":
                raise unsupported_error(
                    "uses, in another process, a tensor of the virtual GPU, which has no data", no_gpu.HINT
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            self._refuse_virtual(args, kwargs)
            return func(*args, **(kwargs or {}))
        if self.recorder.writer.has_worker_threads and not self.operator_lock.is_held:
            with self.operator_lock.hold():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if torch.empty is not _FACTORIES["empty"]:
            with _restore_factories():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if dispatch.get_dispatch_mode(dispatch.TorchDispatchModeKey.FAKE) is not None:
            # DTensor computes the shapes of results with fake tensors, which take no memory.
            return func(*args, **(kwargs or {}))
        if types and any(kind.__torch_dispatch__ is not dispatch.disabled_torch_dispatch_impl for kind in types):
            # A tensor subclass unwraps itself first; its inner operators call this mode again.
            return NotImplemented
        try:
            with torch.DisableTorchFunction():
                operator = self._operators.get(id(func)) or self._get_operator_info(func)
                if operator.expansion is not None:
                    if operator.in_python:
                        with (
                            dispatch.EnableTorchFunction(),
                            set_python_dispatch(),
                            self.function_mode,
                            self,
                            self.operator_lock.release(),
                        ):
                            return operator.expansion(*args, **(kwargs or {}))
                    with self:
                        return operator.expansion(*args, **(kwargs or {}))
                if (
                    operator.kind is OpKind.VIEW
                    and operator.handler is None
                    and not args[0].is_quantized
                    and not (args[0].is_sparse and operator.packet in sparse.sparse_kernel)  # transposed: a copy
                ):
                    if self.gpus.several:
                        self.autograd_nodes.note_gpu(self.device_of(args[0]))
                    result = func(*args, **kwargs) if kwargs else func(*args)
                    attribution = self.recorder.attribution
                    attribution.record_forward_operator(attribution.find_call_site(sys._getframe(1)))
                    return result
                if self.cast is not None and called_by_engine():
                    with self:
                        args, kwargs = self.cast(operator.packet, args, kwargs)
                call = OperatorCall(func, args, kwargs or {}, self)
                updates = self.updates
                if updates is not None and not (updates.is_watching and (call.on_gpu or "device" in call.kwargs)):
                    updates = None
                if updates is not None:
                    updates.record_operator_begin(call.tensors)
                place = self.recorder.attribution.find_call_site(sys._getframe(1))
                if call.sparse or call.quantized or operator.makes_sparse:
                    return self._run_sparse_or_quantized(operator, call, place)
                if self.recorder.streams.uses_other_streams and call.on_gpu:
                    self.recorder.record_stream_use(call.tensors)
                if self.gpus.several:
                    choose_gpu(self, operator, call, place)
                mixed = (call.real and call.device) or (call.on_host and call.on_gpu)
                if mixed and not operator.mixes_devices:
                    resolve_mixed_devices(self, operator, call, place)
                self.recorder.attribution.record_forward_operator(place)
                if operator.is_partial_write and self.caches.is_watching:
                    self.caches.record_write(args[0])
                elif operator.is_cat and self.caches.is_watching:
                    self.caches.record_concatenation(args[0])
                if operator.maybe_in_place and in_backward():
                    plain = self._find_in_place_operator(call)
                    if plain is not None:
                        call.func, call.key[0] = plain, id(plain)
                        operator = self._operators.get(id(plain)) or self._get_operator_info(plain)
                result = NotImplemented
                if operator.handler is not None and (call.on_gpu or operator.runs_on_any_device):
                    result = operator.handler(KernelContext(self, operator, call, place))
                if result is NotImplemented:
                    if operator.kind is OpKind.IN_PLACE:
                        result = self._in_place.run(self, operator, call, place)
                    else:
                        result = self.run_allocating(operator, call, place)
                self.meter.count(operator, call, result)
                if updates is not None:
                    _note_update(updates, call, result)
                return result
        except BaseException as error:
            clear_frames(error)
            args = kwargs = call = result = None  # type: ignore[assignment]
            raise

    def _run_sparse_or_quantized(self, operator: OpInfo, call: OperatorCall, place: CallSite) -> Any:
        """Run an operator on sparse or quantized tensors: on the host by torch, else by kernels/."""
        moves = call.kwargs.get("device") is not None and call.kwargs["device"].type == "meta"
        if call.device is None and not moves:
            return call.func(*call.args, **call.kwargs)
        if call.quantized:
            return quantized_tensors.run_quantized(KernelContext(self, operator, call, place))
        if call.on_gpu and breaks_device_rule(self, operator, call):
            note_mismatch(self, operator.name, call.tensors, place)
        if call.real and call.device is not None:
            with self, self.factory_device_as(HOST):
                args, kwargs = tree_map_only(torch.Tensor, _to_virtual, (call.args, call.kwargs))
                call = OperatorCall(call.func, args, kwargs, self)
        launch = KernelContext(self, operator, call, place)
        kernel = sparse.sparse_kernel.get(operator.packet)
        result = NotImplemented if kernel is None else kernel(launch)
        if result is NotImplemented:
            raise unsupported_error(f"gives a sparse tensor to {operator.name}", "make it dense: `.to_dense()`")
        return result

    def _get_operator_info(self, func: Any) -> OpInfo:
        return self._operators.setdefault(id(func), describe_operator(func))

    def _device_of_caller(self, call: OperatorCall) -> str:
        """Return the device of a tensor that a C++ function creates like one of the tensors in its arguments."""
        if self.gpus.several and in_backward():
            return call.gpu
        devices = [self.device_of(tensor) for tensor in find_tensors(list(self.current_arguments)) if tensor.is_meta]
        on_gpus = [device for device in devices if is_gpu(device)]
        return on_gpus[0] if on_gpus else HOST if HOST in devices else call.gpu

    def _target_device(self, call: OperatorCall) -> str | None:
        """Return where new storages of this call live: a GPU, HOST, "real" on the CPU, None for genuine meta."""
        device = call.kwargs.get("device")
        if device is not None:
            if device.type != "meta":
                return "real"
            # The program requested the GPU, or a factory in a C++ operator inherits the device of an argument.
            wanted = self.factory_device or call.device or self._device_of_caller(call)
            return None if wanted == "meta" else wanted
        if call.tensors:
            if call.on_gpu:
                return call.gpu
            if call.on_host:
                return HOST
            if call.real and len(call.real) == len(call.tensors):
                return "real"
            # Empty tensors are not recorded; an input without storage does not make the result a genuine meta tensor.
            if all(t.numel() == 0 for t in call.tensors if t.is_meta):
                return call.gpu
            return None
        return "real"

    # -- the three kinds --------------------------------------------------------------------------------------------

    def run_allocating(self, operator: OpInfo, call: OperatorCall, place: CallSite) -> Any:
        """Run an operator that allocates its results, and record these with the other memory that its kernel takes."""
        target = self._target_device(call)
        if target == "real":
            return self._run_on_cpu(operator, call, place)
        if target is None or target == HOST or not (operator.scratch or operator.input_copies or operator.uses_cublas):
            return self._run(operator, call, place, target)
        copies = operator.input_copies(call.args) if operator.input_copies else ()
        if operator.uses_cublas:
            # The output is allocated first: cuBLAS takes its workspace inside the call.
            result = self._run(operator, call, place, target)
            with self.hold_scratch(copies, operator.name, place, target):
                self.allocate_cublas_workspace(operator, call.args, place, target)
            return result
        with self.hold_scratch(copies, operator.name, place, target):
            sizes = operator.scratch(call.args, self.gpu) if operator.scratch else ()
            result = self._run(operator, call, place, target)
            self.allocate_transients(sizes, operator.name, place, target)
        return result

    def _run(self, operator: OpInfo, call: OperatorCall, place: CallSite, target: str | None) -> Any:
        try:
            # The result of an operator without floating point inputs has the program's default dtype.
            key: Any = (torch.get_default_dtype(), *call.key)
            make = self._makers.get(key)
        except TypeError:  # an unhashable argument, such as a generator or a symbolic value
            key = make = None
        if make is None:
            result = run_on_meta(call)
            maker = maker_of(result)
            if maker is not UNCACHED and key is not None:
                inputs = {t.untyped_storage()._cdata for t in call.tensors if t.is_meta}
                if not any(t.untyped_storage()._cdata in inputs for t in find_tensors(result)):
                    self._makers[key] = maker
        else:
            result = make()
        outputs = find_tensors(result)
        if make is None:
            outputs = [part for one in outputs for part in get_sparse_parts(one) or [one]]
        if target is not None:
            self.recorder.storages.record_allocations(outputs, operator.name, place, target)
            self.values.propagate(call.func, call.args, call.kwargs, outputs)
        return result

    def _run_on_cpu(self, operator: OpInfo, call: OperatorCall, place: CallSite) -> Any:
        """Run a host operator on real tensors, unless its result is large: a large result is virtual."""
        # Pinning needs the CUDA driver; it does not change memory on the GPU.
        kwargs = {name: value for name, value in call.kwargs.items() if name != "pin_memory"}
        # A host tensor made in a backward formula is for the gradient of a real tensor.
        if call.factory_bytes() >= MIN_VIRTUAL_HOST_BYTES and not (in_backward() and called_by_engine()):
            result = call.func(*call.args, **{**kwargs, "device": _META})
            made = find_tensors(result)
            self.record(made, operator.name, place, HOST)
            self.values.propagate(call.func, call.args, kwargs, made)
            if operator.packet in UNINITIALIZED:
                for tensor in made:  # the program may fill the tensor where no mode sees it, as a NumPy array
                    self.values.store.set_uniform(tensor, 0)
            return result
        result = call.func(*call.args, **kwargs)
        for tensor in find_tensors(result):
            if tensor.dim() and not tensor.is_meta and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.host_sources[storage._cdata] = (weakref.ref(storage), place.source)
                self.record_real(tensor, operator.name, place)
        return result

    def allocate_cublas_workspace(self, operator: OpInfo, args: Any, place: CallSite, gpu: str) -> None:
        """Allocate the cuBLAS workspace of a call, unless the handle and stream have one."""
        if self.workspaces:
            self._cublas.allocate_if_missing(self, operator, args, place, gpu)

    def clear_workspaces(self) -> None:
        """Free the cuBLAS workspaces."""
        self._cublas.clear(self)

    def process_ended(self, first: int) -> None:
        """Free the memory of a process that has ended: storages from number `first` on, and library workspaces."""
        self.clear_workspaces()
        self.recorder.storages.free_process_storages(first)

    def _find_in_place_operator(self, call: OperatorCall) -> Any:
        """Return the in-place operator that a backward formula calls without modes instead of `call`, or None."""
        target = call.args[0]
        if not isinstance(target, torch.Tensor) or not called_by_engine():
            return None
        index = self.recorder.storages.index_by_address.get(target.untyped_storage()._cdata)
        if index is None:
            return None
        if call.func in FILLS_ZEROS:
            # The zeros that the formula has just made.
            return FILLS_ZEROS[call.func] if index == len(self.recorder.trace.storages) - 1 else None
        if torch.is_grad_enabled() or not self.accumulation.is_sole_owner(target):
            return None
        return formulas.find_in_place(call.func, call.args, self.recorder.trace.op(self.recorder.trace.storages[index]))


def _to_virtual(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.ops.aten._to_copy.default(tensor, device=_META)


def _note_update(updates: UpdateDetector, call: OperatorCall, result: Any) -> None:
    """Report the tensors that `call` has read, written and made to the watch for parameter updates."""
    into = find_tensors(written(call))
    overwrites = call.func.overloadpacket in _OVERWRITES
    read = [one for one in call.tensors if not (overwrites and any(one is other for other in into))]
    updates.record_operator_end(read, into, find_tensors(result))
