"""The dispatch mode: sees every operator below autograd, runs it on meta tensors, and records the storages it makes.

For each operator it decides, once, what kind it is (a view makes no storage, an in-place operator writes into one, the
rest allocate), and for each combination of input layouts it remembers the output's layout (layout.py), so that the
second layer of a model costs a fraction of the first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from memprof.trace.events import GPU, HOST, DeviceMismatch, Operand
from memprof.virtual import layout_cache as layout
from memprof.virtual.calls import (
    HOST_COUNTED_BYTES,
    HOST_VIRTUAL_BYTES,
    MOVES_STORAGE,
    OVERWRITES,
    Call,
    Kind,
    Operator,
    tensors_of,
)
from memprof.virtual.card import Card
from memprof.virtual.engine import FILLS_ZEROS, Accumulation, called_by_engine, in_backward
from memprof.virtual.flops import Meter
from memprof.virtual.kernels import hidden
from memprof.virtual.kernels import in_place_backward as formulas
from memprof.virtual.kernels.operators import HANDLERS
from memprof.virtual.limits import refuse_sharded
from memprof.virtual.values import Values
from memprof.watch.recorder import Place, Recorder
from memprof.watch.wrappers import unwrapped

_META = torch.device("meta")
# An extension that asks C++ for the data gets an error; a null pointer would end the process.
_forbid_data = torch._C._set_throw_on_mutable_data_ptr
_NoTorchFunction = torch._C.DisableTorchFunction
_MAYBE_IN_PLACE = formulas.CANDIDATES | FILLS_ZEROS.keys()
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


class RecordingMode(TorchDispatchMode):
    """Runs the program's operators on the virtual GPU."""

    def __init__(
        self,
        recorder: Recorder,
        values: Values,
        workspace: hidden.CublasWorkspace | None,
        card: Card,
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = values
        self.factory_device: str | None = None
        """Set by the function mode around a factory call: the device that the program asked for."""
        self._workspace = workspace
        self.card = card
        self._taken_workspaces: set[str] = set()
        self._operators: dict[Any, Operator] = {}
        self._layouts: dict[Any, Any] = {}
        self._done_in_place: dict[Any, bool] = {}
        self._host: set[int] = set()
        self._host_sources: dict[int, tuple[Any, int]] = {}
        self.empty_meta: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages without bytes that are genuinely on the meta device."""
        self.accumulation = Accumulation()
        self.meter = Meter(recorder, self.device_of)
        self.cast: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
        """Autocast, while a backward pass runs inside its region: no function mode sees what the engine calls."""
        self.adds_bias = False
        """Whether the operators that run are those of a linear layer with a bias."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps every call in a guard against torch.compile, and imports all of dynamo for it.
        return False

    # -- devices ----------------------------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> str:
        """The device that the program believes `tensor` to be on."""
        if not tensor.is_meta:
            return str(tensor.device)
        return self.device_of_storage(unwrapped(tensor).untyped_storage())

    def device_of_storage(self, storage: torch.UntypedStorage) -> str:
        """The same of a storage on torch's meta device."""
        address = storage._cdata
        if address not in self.recorder.live:
            # Empty tensors take no memory and are not tracked; but for those that the program asked of the meta device
            # itself, they are taken for the program's own.
            return "meta" if storage.nbytes() or storage in self.empty_meta else GPU
        return HOST if address in self._host else GPU

    def is_on_card(self, tensor: torch.Tensor) -> bool:
        """Whether the program believes `tensor` to be on the card."""
        with _NoTorchFunction():
            return self.device_of(tensor) == GPU

    def is_virtual(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` stands for one that has data in a real run."""
        with _NoTorchFunction():
            return tensor.is_meta and self.device_of(tensor) != "meta"

    def forget(self, address: int) -> None:
        """The storage at `address` died."""
        self.values.drop(address)
        self._host.discard(address)

    # -- every operator ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            # A tensor subclass unwraps itself first; its inner operators come back here.
            refuse_sharded(types)
            return NotImplemented
        with _NoTorchFunction():
            operator = self._operator(func)
            if operator.expansion is not None:
                with self:
                    return operator.expansion(*args, **(kwargs or {}))
            if operator.kind is Kind.VIEW and operator.handler is None:
                result = func(*args, **kwargs) if kwargs else func(*args)
                self.recorder.note_forward(self.recorder.place(sys._getframe(1)))
                return result
            if self.cast is not None and called_by_engine():
                with self:
                    args, kwargs = self.cast(operator.packet, args, kwargs)
            call = Call(func, args, kwargs or {})
            for arg in args:
                self._look(arg, call)
            if kwargs:
                for name, arg in kwargs.items():
                    call.key.append(name)
                    self._look(arg, call)
            place = self.recorder.place(sys._getframe(1))
            mixed = (call.real and call.device) or (call.on_host and call.on_gpu)
            if mixed and not operator.mixes_devices:
                self._check_devices(operator, call, place)
            self.recorder.note_forward(place)
            if func in _MAYBE_IN_PLACE and in_backward():
                plain = self._on_plain_run(call)
                if plain is not None:
                    call.func = call.key[0] = plain
                    operator = self._operator(plain)
            if operator.handler is not None:
                result = operator.handler(self, operator, call, place)
                if result is not NotImplemented:
                    self.meter.count(operator, call, result)
                    return result
            if operator.kind is Kind.IN_PLACE:
                result = self._in_place(operator, call, place)
            else:
                result = self.allocating(operator, call, place)
            self.meter.count(operator, call, result)
            return result

    def _operator(self, func: Any) -> Operator:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func, HANDLERS.get(func.overloadpacket))
        return operator

    def _look(self, arg: Any, call: Call) -> None:
        if isinstance(arg, torch.Tensor):
            call.tensors.append(arg)
            if arg.is_meta:
                call.key.append((arg.size(), arg.stride(), arg.dtype))
                address = arg.untyped_storage()._cdata
                if address in self.recorder.live:
                    if address in self._host:
                        call.on_host = True
                    else:
                        call.on_gpu = True
                else:
                    call.on_meta = True
            else:
                call.real.append(arg)
                call.key.append(("real", arg.size(), arg.dtype))
        elif isinstance(arg, (list, tuple)):
            call.key.append(len(arg))
            for part in arg:
                self._look(part, call)
        else:
            call.key.append(arg.__class__)
            call.key.append(arg)

    def _target_device(self, call: Call) -> str | None:
        """Where new storages of this call live: GPU, HOST, "real" on the CPU, or None for a genuine meta tensor."""
        device = call.kwargs.get("device")
        if device is not None:
            if device.type != "meta":
                return "real"
            # The program asked for the GPU, or (a factory inside a C++ operator) inherits it from a device tensor.
            wanted = self.factory_device or call.device or GPU
            return None if wanted == "meta" else wanted
        if call.tensors:
            if call.on_gpu:
                return GPU
            if call.on_host:
                return HOST
            if call.real and len(call.real) == len(call.tensors):
                return "real"
            # Empty tensors are not tracked; a storage-less input does not make its result a genuine meta tensor.
            if all(t.numel() == 0 for t in call.tensors if t.is_meta):
                return GPU
            return None
        return "real"

    # -- the three kinds --------------------------------------------------------------------------------------------

    def allocating(self, operator: Operator, call: Call, place: Place) -> Any:
        """Run an operator that makes new storages, and record them with what its kernel takes beside them."""
        target = self._target_device(call)
        if target == "real":
            return self._on_cpu(operator, call, place)
        if operator.uses_cublas and target == GPU:
            # The output comes first: cuBLAS takes its workspace inside the call.
            result = self._run(operator, call, place, target)
            copied = operator.input_copies(call.args) if operator.input_copies else []
            taken = [self.recorder.allocate_hidden(size, operator.name, place, GPU) for size in copied]
            self._take_workspace(operator, place)
            for index in taken:
                self.recorder.free_hidden(index)
            return result
        if target != GPU or (operator.temporaries is None and operator.input_copies is None):
            return self._run(operator, call, place, target)
        copies = operator.input_copies(call.args) if operator.input_copies else []
        taken = [self.recorder.allocate_hidden(size, operator.name, place, GPU) for size in copies]
        temporaries = operator.temporaries(call.args, self.card) if operator.temporaries else []
        result = self._run(operator, call, place, target)
        self.transients(temporaries, operator, place)
        for index in taken:
            self.recorder.free_hidden(index)
        return result

    def _run(self, operator: Operator, call: Call, place: Place, target: str | None) -> Any:
        """Run `call` on meta tensors and record its new storages."""
        try:
            key: Any = tuple(call.key)
            known = self._layouts.get(key)
        except TypeError:  # an unhashable argument, such as a generator or a symbolic value
            key = known = None
        if known is None:
            result = call.func(*call.args, **call.kwargs)
            described = layout.describe(result)
            if described is not layout.UNCACHED and key is not None:
                inputs = {t.untyped_storage()._cdata for t in call.tensors if t.is_meta}
                if any(t.untyped_storage()._cdata in inputs for t in tensors_of(result)):
                    described = layout.UNCACHED
            if described is not layout.UNCACHED and key is not None:
                self._layouts[key] = described
        else:
            result = layout.build(known)
        outputs = tensors_of(result)
        if target is not None:
            self.record(outputs, operator.name, place, target)
            self.values.learn(call.func, call.args, call.kwargs, outputs)
        return result

    def _in_place(self, operator: Operator, call: Call, place: Place) -> Any:
        target = call.args[0] if call.args and isinstance(call.args[0], torch.Tensor) else None
        if call.real and not (call.on_gpu or call.on_host or call.on_meta):
            return call.func(*call.args, **call.kwargs)
        if target is None or "out" in call.kwargs:
            return self._foreach_or_out(operator, call, place)
        if operator.temporaries is not None and call.on_gpu:
            self.transients(operator.temporaries(call.args, self.card), operator, place)
        if target.is_meta and (
            self.values.knows(target.untyped_storage()._cdata) or call.func.overloadpacket in OVERWRITES
        ):
            self.values.write(call.func, call.args, call.kwargs, target)
        try:
            key: Any = tuple(call.key)
            if key in self._done_in_place:
                return target
        except TypeError:
            key = None
        storage = target.untyped_storage()
        before = storage.nbytes()
        layout_before = (target.size(), target.stride())
        result = call.func(*call.args, **call.kwargs)
        # One that only took over another storage (set_) has made none.
        if storage.nbytes() != before and target.untyped_storage()._cdata == storage._cdata:
            self._grown(target, operator, place)
        if result is not target and call.on_gpu:
            # It writes into one argument and returns something new all the same (rrelu_with_noise).
            self.record([made for made in tensors_of(result) if made is not target], operator.name, place, GPU)
        # What changes the tensor itself (t_, squeeze_) must be done every time.
        unchanged = (target.size(), target.stride()) == layout_before and operator.packet not in MOVES_STORAGE
        if key is not None and result is target and unchanged and target.untyped_storage().nbytes() == before:
            self._done_in_place[key] = True
        return result

    def _foreach_or_out(self, operator: Operator, call: Call, place: Place) -> Any:
        """In-place operators on lists (the optimizers') and those with `out=`."""
        if operator.name.startswith(("aten._foreach_", "aten._fused_")) and not call.real:
            return None
        outs = [t for t in tensors_of(list(call.kwargs.values())) if t.is_meta]
        before = [t.untyped_storage().nbytes() for t in outs]
        known = None
        if len(outs) == 1 and isinstance(call.kwargs.get("out"), torch.Tensor):
            written = torch.empty(0, dtype=outs[0].dtype)
            known = self.values.compute(call.func, call.args, {**call.kwargs, "out": written})
        result = call.func(*call.args, **call.kwargs)
        for out, size in zip(outs, before, strict=True):
            self.values.drop(out.untyped_storage()._cdata)
            if out.untyped_storage().nbytes() != size:
                self._grown(out, operator, place)
        whole = len(outs) == 1 and outs[0].untyped_storage().nbytes() == outs[0].numel() * outs[0].element_size()
        if whole and isinstance(known, torch.Tensor) and known.shape == outs[0].shape and self.values.wants(outs[0]):
            self.values.set(outs[0], known)
        return result

    def _grown(self, tensor: torch.Tensor, operator: Operator, place: Place) -> None:
        """An operator resized `tensor`'s storage: on CUDA the old block is given back and a new one taken."""
        storage = tensor.untyped_storage()
        index = self.recorder.live.get(storage._cdata)
        device = GPU if index is None else self.recorder.trace.storages[index].device
        if index is not None:
            self.recorder.release(index)
        if storage.nbytes():
            self.recorder.allocate(storage, tensor.shape, tensor.dtype, device, operator.name, place)

    def _on_cpu(self, operator: Operator, call: Call, place: Place) -> Any:
        """A host operator: really run, unless its result is large; then it is virtual as well."""
        # Pinning asks the CUDA driver; to the card it makes no difference.
        kwargs = {name: value for name, value in call.kwargs.items() if name != "pin_memory"}
        if call.factory_bytes() >= HOST_VIRTUAL_BYTES:
            result = call.func(*call.args, **{**kwargs, "device": _META})
            self.record(tensors_of(result), operator.name, place, HOST)
            return result
        result = call.func(*call.args, **kwargs)
        for tensor in tensors_of(result):
            if tensor.dim() and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._host_sources[storage._cdata] = (weakref.ref(storage), place.source)
                self.record_real(tensor, operator.name, place)
        return result

    # -- recording --------------------------------------------------------------------------------------------------

    def record(self, tensors: list[torch.Tensor], op: str, place: Place, device: str) -> None:
        """Record the storages of `tensors` that are not known yet."""
        live = self.recorder.live
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in live and tensor.is_meta and storage.nbytes():
                _forbid_data(tensor)
                self.recorder.allocate(storage, tensor.size(), tensor.dtype, device, op, place)
                if device == HOST:
                    self._host.add(storage._cdata)

    def record_real(self, tensor: torch.Tensor, op: str, place: Place) -> None:
        """Record a new host tensor that has data: too small to be virtual, yet a model may have many."""
        storage = tensor.untyped_storage()
        if storage.nbytes() >= HOST_COUNTED_BYTES and storage._cdata not in self.recorder.live:
            self.recorder.allocate(storage, tensor.size(), tensor.dtype, HOST, op, place)

    def transients(self, sizes: list[int], operator: Operator, place: Place) -> None:
        """Temporaries of a kernel: taken one after the other, all given back when it returns."""
        taken = [self.recorder.allocate_hidden(size, operator.name, place, GPU) for size in sizes if size]
        for index in taken:
            self.recorder.free_hidden(index)

    def _take_workspace(self, operator: Operator, place: Place) -> None:
        if self._workspace is None:
            return
        if not self._workspace.permanent:
            self.transients([self._workspace.num_bytes], operator, place)
            return
        thread = "backward" if in_backward() else "forward"
        if thread not in self._taken_workspaces:
            self.recorder.allocate_hidden(self._workspace.num_bytes, "cublas workspace", place, GPU, keep=True)
            self._taken_workspaces.add(thread)
        lt = "lt " + thread
        if operator.uses_cublaslt and self._workspace.lt_num_bytes and lt not in self._taken_workspaces:
            self.recorder.allocate_hidden(self._workspace.lt_num_bytes, "cublaslt workspace", place, GPU, keep=True)
            self._taken_workspaces.add(lt)

    # -- device mismatch --------------------------------------------------------------------------------------------

    def _check_devices(self, operator: Operator, call: Call, place: Place) -> None:
        """CUDA's rule: all tensors on one device, but that host scalars (0-dim) may mix. A breach is noted, and the
        run goes on as if the host tensors had been moved."""
        strangers = [t for t in call.real if t.dim() > 0]
        if call.on_gpu:
            strangers += [t for t in call.tensors if t.is_meta and t.dim() > 0 and self.device_of(t) == HOST]
        if not strangers:
            return
        if not call.on_gpu and call.on_host:
            # Host tensors among themselves: the small ones are real, the large ones virtual; no mismatch.
            self._virtualise(call)
            return
        self.note_mismatch(operator, call, place)
        self._virtualise(call)

    def note_mismatch(self, operator: Operator, call: Call, place: Place) -> None:
        """On a real GPU this call raises: keep what it was given, and where from."""
        self._note_mixed(operator.name, call.tensors, place)

    def note_mixed(self, op: str, tensors: list[torch.Tensor]) -> None:
        """A call that C++ would refuse before any operator is seen was given these tensors."""
        self._note_mixed(op, tensors, self.recorder.place(sys._getframe(1)))

    def _note_mixed(self, op: str, tensors: list[torch.Tensor], place: Place) -> None:
        self.recorder.mismatch(
            DeviceMismatch(
                len(self.recorder.trace.events),
                self.recorder.op_index(op),
                place.module,
                place.source,
                tuple(self._operand(tensor) for tensor in tensors),
            )
        )

    def _operand(self, tensor: torch.Tensor) -> Operand:
        storage = tensor.untyped_storage()
        source = -1
        if tensor.is_meta:
            index = self.recorder.live.get(storage._cdata)
            if index is not None:
                source = self.recorder.trace.storages[index].source
        else:
            ref, origin = self._host_sources.get(storage._cdata, (lambda: None, -1))
            if ref() is storage:
                source = origin
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Operand(self.device_of(tensor), tuple(tensor.shape), dtype, source)

    def _virtualise(self, call: Call) -> None:
        """Replace the real host tensors of `call` by meta ones, so that it can run on meta."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
            return value

        call.args = tree_map(move, call.args)
        call.kwargs = tree_map(move, call.kwargs)
        call.key = [call.func]
        call.tensors = []
        call.real = []
        for arg in call.args:
            self._look(arg, call)
        for name, arg in call.kwargs.items():
            call.key.append(name)
            self._look(arg, call)

    def _on_plain_run(self, call: Call) -> Any:
        """The operator in place that a backward formula calls on a plain run where `call` is out of place; or None."""
        target = call.args[0]
        if not isinstance(target, torch.Tensor) or not called_by_engine():
            return None
        index = self.recorder.live.get(target.untyped_storage()._cdata)
        if index is None:
            return None
        if call.func in FILLS_ZEROS:
            # The zeros that it has just made.
            return FILLS_ZEROS[call.func] if index == len(self.recorder.trace.storages) - 1 else None
        if torch.is_grad_enabled() or not self.accumulation.is_sole_owner(target):
            return None
        return formulas.in_place(call.func, call.args, self.recorder.trace.op(self.recorder.trace.storages[index]))
