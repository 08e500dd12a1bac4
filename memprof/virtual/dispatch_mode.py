"""The dispatch mode: runs every operator below autograd on meta tensors, and records new storages.

The mode classifies each operator once: a view shares a storage, an in-place operator writes into a storage, other
operators allocate. For each combination of input layouts it caches the output's layout (layout_cache.py), so that the
second layer of a model costs a fraction of the first.
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
from memprof.virtual.column_broadcasts import record_column_broadcast
from memprof.virtual.cublas_workspaces import CublasWorkspaces
from memprof.virtual.device_checks import breaks_device_rule, choose_gpu, note_mismatch, resolve_mixed_devices
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import FILLS_ZEROS, is_called_by_engine, is_in_backward
from memprof.virtual.gpus import Gpus
from memprof.virtual.in_place import InPlaceOperators
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import inplace_backward_formulas as formulas
from memprof.virtual.kernels import quantized_tensors, sparse
from memprof.virtual.kernels.expansion import set_python_dispatch
from memprof.virtual.layout_cache import UNCACHED, make_factory
from memprof.virtual.limits import unsupported_error
from memprof.virtual.op_info import describe_operator
from memprof.virtual.operator_call import (
    MIN_VIRTUAL_BYTES,
    OVERWRITES,
    OperatorCall,
    OpInfo,
    OpKind,
    find_tensors,
    find_written_arguments,
    run_on_meta,
)
from memprof.virtual.repeats import record_repeat
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
    """Context manager: restore torch's own factory functions, which a program may have replaced (nanotron does)."""
    with PatchSet() as patches:
        patches.apply_all((torch, name, factory) for name, factory in _FACTORIES.items())
        yield


class DispatchMode(DeviceState):
    """The dispatch mode that runs the program's operators on the virtual GPU."""

    def __init__(self, recorder: Recorder, values: Values, gpu: DeviceProperties, gpus: Gpus, workspaces: bool) -> None:
        super().__init__(recorder, values, gpu, gpus, workspaces)
        # Keyed by the `id` of the overload, which the OpInfo keeps alive: the overload's own hash is a Python function.
        self._operators: dict[int, OpInfo] = {}
        # Key of a call -> function that creates tensors like its outputs.
        self._factories: dict[Any, Callable[[], Any]] = {}
        self._in_place = InPlaceOperators()
        self._cublas = CublasWorkspaces()
        self.kv_caches = KVCacheDetector(recorder)
        self.updates: UpdateDetector | None = None  # None: the workload has torch's optimizers alone
        # Autocast in a backward pass inside its region: no function mode sees the operators that the engine calls.
        self.cast_arguments: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
        self.is_off = False  # in a forked child, where operators run as without this mode
        self.function_mode: Any = contextlib.nullcontext()  # the mode under which an operator written in Python runs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps every call in a guard against torch.compile, which imports all of dynamo.
        return False

    # -- every operator ---------------------------------------------------------------------------------------------

    def _refuse_virtual(self, args: Any, kwargs: Any) -> None:
        """Raise MemprofError if an argument is a virtual tensor: a forked child has no virtual GPU."""
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
        if types and any(cls.__torch_dispatch__ is not dispatch.disabled_torch_dispatch_impl for cls in types):
            # A tensor subclass unwraps itself first; its inner operators call this mode again.
            return NotImplemented
        try:
            with torch.DisableTorchFunction():
                operator = self._operators.get(id(func)) or self._get_operator_info(func)
                if operator.expansion is not None:
                    if operator.runs_in_python:
                        with (
                            dispatch.EnableTorchFunction(),
                            set_python_dispatch(),
                            self.function_mode,
                            self,
                            self.operator_lock.release(),
                        ):
                            return operator.expansion(*args, **(kwargs or {}))
                    is_repeat = operator.packet is torch.ops.aten.repeat
                    with self, record_repeat(self.recorder.trace, *args) if is_repeat else contextlib.nullcontext():
                        return operator.expansion(*args, **(kwargs or {}))
                if (
                    operator.kind is OpKind.VIEW
                    and operator.handler is None
                    and not args[0].is_quantized
                    and not (args[0].is_sparse and operator.packet in sparse.sparse_kernel)  # transposed: a copy
                ):
                    if self.gpus.has_several:
                        self.autograd_nodes.note_gpu(self.device_of(args[0]))
                    result = func(*args, **kwargs) if kwargs else func(*args)
                    attribution = self.recorder.attribution
                    attribution.record_forward_operator(attribution.find_call_site(sys._getframe(1)))
                    return result
                if self.cast_arguments is not None and is_called_by_engine():
                    with self:
                        args, kwargs = self.cast_arguments(operator.packet, args, kwargs)
                call = OperatorCall(func, args, kwargs or {}, self)
                updates = self.updates
                if updates is not None and not (updates.is_watching and (call.on_gpu or "device" in call.kwargs)):
                    updates = None
                if updates is not None:
                    updates.record_operator_begin(call.tensors)
                site = self.recorder.attribution.find_call_site(sys._getframe(1))
                if call.sparse or call.quantized or operator.returns_sparse:
                    result = self._run_sparse_or_quantized(operator, call, site)
                    self.recorder.storages.record_uses(call.tensors)
                    return result
                if self.recorder.streams.uses_other_streams and call.on_gpu:
                    self.recorder.record_stream_use(call.tensors)
                if self.gpus.has_several:
                    choose_gpu(self, operator, call, site)
                is_mixed = (call.real and call.device) or (call.on_host and call.on_gpu)
                if is_mixed and not operator.mixes_devices:
                    resolve_mixed_devices(self, operator, call, site)
                self.recorder.attribution.record_forward_operator(site)
                if operator.is_partial_write and self.kv_caches.is_watching:
                    self.kv_caches.record_write(args[0])
                elif operator.is_concatenation and self.kv_caches.is_watching:
                    self.kv_caches.record_concatenation(args[0])
                if operator.may_run_in_place and is_in_backward():
                    in_place_func = self._find_in_place_operator(call)
                    if in_place_func is not None:
                        call.func, call.key[0] = in_place_func, id(in_place_func)
                        operator = self._operators.get(id(in_place_func)) or self._get_operator_info(in_place_func)
                result = NotImplemented
                if operator.handler is not None and (call.on_gpu or operator.runs_on_any_device):
                    result = operator.handler(KernelContext(self, operator, call, site))
                if result is NotImplemented:
                    if operator.kind is OpKind.IN_PLACE:
                        result = self._in_place.run(self, operator, call, site)
                    else:
                        result = self.run_allocating(operator, call, site)
                self.meter.count(operator, call, result)
                self.recorder.storages.record_uses(call.tensors)
                if updates is not None:
                    _report_update(updates, call, result)
                return result
        except BaseException as error:
            clear_frames(error)
            args = kwargs = call = result = None  # type: ignore[assignment]
            raise

    def _run_sparse_or_quantized(self, operator: OpInfo, call: OperatorCall, site: CallSite) -> Any:
        """Return the result of an operator on sparse or quantized tensors: by torch on the host, else by kernels/."""
        targets_gpu = call.kwargs.get("device") is not None and call.kwargs["device"].type == "meta"
        if call.device is None and not targets_gpu:
            return call.func(*call.args, **call.kwargs)
        if call.quantized:
            return quantized_tensors.run_quantized(KernelContext(self, operator, call, site))
        if call.on_gpu and breaks_device_rule(self, operator, call):
            note_mismatch(self, operator.name, call.tensors, site)
        if call.real and call.device is not None:
            with self, self.factory_device_as(HOST):
                args, kwargs = tree_map_only(torch.Tensor, _to_virtual, (call.args, call.kwargs))
                call = OperatorCall(call.func, args, kwargs, self)
        context = KernelContext(self, operator, call, site)
        kernel = sparse.sparse_kernel.get(operator.packet)
        result = NotImplemented if kernel is None else kernel(context)
        if result is NotImplemented:
            raise unsupported_error(f"gives a sparse tensor to {operator.name}", "make it dense: `.to_dense()`")
        return result

    def _get_operator_info(self, func: Any) -> OpInfo:
        return self._operators.setdefault(id(func), describe_operator(func))

    def _find_caller_device(self, call: OperatorCall) -> str:
        """Return the device on which the running C++ function creates tensors: that of its own tensor arguments."""
        if self.gpus.has_several and is_in_backward():
            return call.gpu
        devices = [self.device_of(tensor) for tensor in find_tensors(list(self.current_arguments)) if tensor.is_meta]
        on_gpus = [device for device in devices if is_gpu(device)]
        return on_gpus[0] if on_gpus else HOST if HOST in devices else call.gpu

    def _find_target_device(self, call: OperatorCall) -> str | None:
        """Return the device of new storages of `call`: a GPU, HOST, "real" for the CPU, None for meta."""
        device = call.kwargs.get("device")
        if device is not None:
            if device.type != "meta":
                return "real"
            # The program requested the GPU, or a factory in a C++ operator inherits the device of an argument.
            name = self.factory_device or call.device or self._find_caller_device(call)
            return None if name == "meta" else name
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

    # -- kinds of operators -------------------------------------------------------------------------------------------

    def run_allocating(self, operator: OpInfo, call: OperatorCall, site: CallSite) -> Any:
        """Return the result of an operator that allocates; record its outputs and the scratch memory of its kernel."""
        target = self._find_target_device(call)
        if target == "real":
            return self._run_on_cpu(operator, call, site)
        if target is None or target == HOST or not (operator.scratch or operator.input_copies or operator.uses_cublas):
            return self._run(operator, call, site, target)
        copies = operator.input_copies(call.args) if operator.input_copies else ()
        if operator.uses_cublas:
            # The output is allocated first: cuBLAS takes its workspace inside the call.
            result = self._run(operator, call, site, target)
            with self.hold_scratch(copies, operator.name, site, target):
                self.allocate_cublas_workspace(operator, call.args, site, target)
            return result
        with self.hold_scratch(copies, operator.name, site, target):
            sizes = operator.scratch(call.args, self.gpu) if operator.scratch else ()
            result = self._run(operator, call, site, target)
            self.allocate_transients(sizes, operator.name, site, target)
        return result

    def _run(self, operator: OpInfo, call: OperatorCall, site: CallSite, target: str | None) -> Any:
        try:
            # The result of an operator without floating point inputs has the program's default dtype.
            key: Any = (torch.get_default_dtype(), *call.key)
            create = self._factories.get(key)
        except TypeError:  # an unhashable argument, such as a generator or a symbolic value
            key = create = None
        if create is None:
            result = run_on_meta(call)
            factory = make_factory(result)
            if factory is not UNCACHED and key is not None:
                inputs = {t.untyped_storage()._cdata for t in call.tensors if t.is_meta}
                if not any(t.untyped_storage()._cdata in inputs for t in find_tensors(result)):
                    self._factories[key] = factory
        else:
            result = create()
        outputs = find_tensors(result)
        if create is None:
            outputs = [sparse_part for output in outputs for sparse_part in get_sparse_parts(output) or [output]]
        if target is not None:
            try:
                self.recorder.storages.record_allocations(outputs, operator.name, site, target)
            finally:
                if create is None:  # the first time, with these layouts; also of an allocation that fails
                    record_column_broadcast(self.recorder, operator.name, call, outputs)
            self.values.propagate(call.func, call.args, call.kwargs, outputs)
        return result

    def _run_on_cpu(self, operator: OpInfo, call: OperatorCall, site: CallSite) -> Any:
        """Return the result of an operator on the CPU, real if small, virtual from `MIN_VIRTUAL_BYTES` on."""
        # Pinning needs the CUDA driver; it does not change memory on the GPU.
        kwargs = {name: value for name, value in call.kwargs.items() if name != "pin_memory"}
        # A host tensor made in a backward formula is for the gradient of a real tensor.
        if call.count_factory_bytes() >= MIN_VIRTUAL_BYTES and not (is_in_backward() and is_called_by_engine()):
            result = call.func(*call.args, **{**kwargs, "device": _META})
            outputs = find_tensors(result)
            self.record(outputs, operator.name, site, HOST)
            self.values.propagate(call.func, call.args, kwargs, outputs)
            if operator.packet in UNINITIALIZED:
                for tensor in outputs:  # the program may fill the tensor where no mode sees it, as a NumPy array
                    self.values.store.set_uniform(tensor, 0)
            return result
        result = call.func(*call.args, **kwargs)
        for tensor in find_tensors(result):
            if tensor.dim() and not tensor.is_meta and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.host_sources[storage._cdata] = (weakref.ref(storage), site.source)
                self.record_real(tensor, operator.name, site)
        return result

    def allocate_cublas_workspace(self, operator: OpInfo, args: Any, site: CallSite, gpu: str) -> None:
        """Allocate the cuBLAS workspace of a call, unless the current handle and stream have one."""
        if self.workspaces:
            self._cublas.allocate_once(self, operator, args, site, gpu)

    def clear_workspaces(self) -> None:
        """Free the cuBLAS workspaces."""
        self._cublas.clear(self)

    def free_process_memory(self, first_storage: int) -> None:
        """Free the memory of a process that has ended: storages from index `first_storage` on, and workspaces."""
        self.clear_workspaces()
        self.recorder.storages.free_process_storages(first_storage)

    def _find_in_place_operator(self, call: OperatorCall) -> Any:
        """Return the in-place operator that a backward formula calls without modes in place of `call`, or None."""
        target = call.args[0]
        if not isinstance(target, torch.Tensor) or not is_called_by_engine():
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


def _report_update(updates: UpdateDetector, call: OperatorCall, result: Any) -> None:
    """Report the tensors that `call` has read, written and returned to `updates`, which finds optimizer steps."""
    written_tensors = find_tensors(find_written_arguments(call))
    overwrites = call.func.overloadpacket in _OVERWRITES
    read_tensors = [t for t in call.tensors if not (overwrites and any(t is written for written in written_tensors))]
    updates.record_operator_end(read_tensors, written_tensors, find_tensors(result))
