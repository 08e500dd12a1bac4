"""Operators that write into their arguments: in place, with `out=`, or on lists, as the optimizers' operators do."""

from __future__ import annotations

from typing import Any

import torch

from memprof.trace.events import NONE
from memprof.virtual.device_state import DeviceState
from memprof.virtual.operator_call import (
    MOVES_STORAGE,
    OVERWRITES,
    OperatorCall,
    OpInfo,
    find_tensors,
    find_written_arguments,
    get_returned_arguments,
    returns_only_written,
    run_on_meta,
)
from memprof.watch.forward import CallSite


class InPlaceOperators:
    """Runner of in-place operators on meta tensors, which records storages that they resize."""

    def __init__(self) -> None:
        self._changes_nothing: set[Any] = set()  # keys of calls that do nothing to meta tensors

    def run(self, device_state: DeviceState, operator: OpInfo, call: OperatorCall, site: CallSite) -> Any:
        """Return the result of `call`, run on meta tensors."""
        target = call.args[0] if call.args and isinstance(call.args[0], torch.Tensor) else None
        if call.real and not (call.on_gpu or call.on_host or call.on_meta):
            return call.func(*call.args, **call.kwargs)
        if target is None or "out" in call.kwargs:
            return self._run_on_lists_or_out(device_state, operator, call, site)
        if operator.scratch is not None and call.on_gpu:
            sizes = operator.scratch(call.args, device_state.gpu)
            device_state.allocate_transients(sizes, operator.name, site, call.gpu)
        if operator.uses_cublas and call.on_gpu:
            device_state.allocate_cublas_workspace(operator, call.args, site, call.gpu)
        address = target.untyped_storage()._cdata if target.is_meta else NONE
        # The program's own meta tensors are not recorded: their addresses may be reused by recorded storages.
        is_live = address in device_state.recorder.storages.index_by_address
        if is_live and (device_state.values.store.is_known(address) or call.func.overloadpacket in OVERWRITES):
            device_state.values.write(call.func, call.args, call.kwargs, target)
        key, changes_nothing = self._look_up(call)
        if changes_nothing:
            return target
        storage, num_bytes, layout = target.untyped_storage(), target.untyped_storage().nbytes(), _layout(target)
        try:
            result = run_on_meta(call)
        except NotImplementedError:
            if not returns_only_written(call.func):
                raise
            return _run_as_fill(device_state, call)
        # An operator that only exchanged the storage (set_) has allocated none.
        if storage.nbytes() != num_bytes and target.untyped_storage()._cdata == storage._cdata:
            _record_growth(device_state, target, operator, site)
        if result is not target and call.on_gpu:
            # The operator writes into one argument and also returns a new tensor (rrelu_with_noise).
            new_tensors = [tensor for tensor in find_tensors(result) if tensor is not target]
            device_state.record(new_tensors, operator.name, site, call.gpu)
        # Operators that change the tensor's own sizes (t_, squeeze_) must run every time.
        is_unchanged = result is target and operator.packet not in MOVES_STORAGE and _layout(target) == layout
        if key is not None and is_unchanged:
            self._changes_nothing.add(key)
        return result

    def _run_on_lists_or_out(
        self, device_state: DeviceState, operator: OpInfo, call: OperatorCall, site: CallSite
    ) -> Any:
        if operator.name.startswith(("aten._foreach_", "aten._fused_")) and not call.real:
            _forget_written(device_state, call)
            return None
        outs = [t for t in find_tensors(list(call.kwargs.values())) if t.is_meta]
        sizes_before = [t.untyped_storage().nbytes() for t in outs]
        copies = operator.input_copies(call.args) if operator.input_copies and call.on_gpu else ()
        new_values: Any = None
        if len(outs) == 1 and isinstance(call.kwargs.get("out"), torch.Tensor):
            empty = torch.empty(0, dtype=outs[0].dtype)
            new_values = device_state.values.evaluator.compute(call.func, call.args, {**call.kwargs, "out": empty})
        with device_state.hold_scratch(copies, operator.name, site, call.gpu):
            if operator.uses_cublas and call.on_gpu:
                device_state.allocate_cublas_workspace(operator, call.args, site, call.gpu)
            try:
                result = self._run_into_out(operator, call)
            except NotImplementedError:
                if not returns_only_written(call.func):
                    raise
                return _run_as_fill(device_state, call)
        store = device_state.values.store
        for out, size in zip(outs, sizes_before, strict=True):
            store.drop(out.untyped_storage()._cdata)
            if out.untyped_storage().nbytes() != size:
                _record_growth(device_state, out, operator, site)
        is_full = len(outs) == 1 and outs[0].untyped_storage().nbytes() == outs[0].numel() * outs[0].element_size()
        is_new_value = is_full and isinstance(new_values, torch.Tensor) and new_values.shape == outs[0].shape
        if is_new_value and store.is_trackable(outs[0]):
            store.set(outs[0], new_values)
        return result

    def _run_into_out(self, operator: OpInfo, call: OperatorCall) -> Any:
        """Return the result of a call with `out=`; it is not run again if an equal call has changed no meta tensor."""
        out = call.kwargs.get("out")
        if not isinstance(out, torch.Tensor) or call.real or operator.packet in MOVES_STORAGE:
            return call.func(*call.args, **call.kwargs)
        key, changes_nothing = self._look_up(call)
        if changes_nothing:
            return out
        layout = _layout(out)
        result = call.func(*call.args, **call.kwargs)
        if key is not None and result is out and _layout(out) == layout:
            self._changes_nothing.add(key)
        return result

    def _look_up(self, call: OperatorCall) -> tuple[Any, bool]:
        """Return the key of `call` (None if not hashable), and whether calls with this key change no meta tensor."""
        key = tuple(call.key)
        try:
            return key, key in self._changes_nothing
        except TypeError:  # an argument such as a generator or a symbolic value
            return None, False


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.untyped_storage().nbytes()


def _run_as_fill(device_state: DeviceState, call: OperatorCall) -> Any:
    """Return the result of an operator without a meta kernel, as if it only fills its arguments."""
    device_state.values.assume(
        f"{call.func._schema.name} has no kernel that works without data: as it returns nothing but what it is "
        "given, it fills that and allocates nothing."
    )
    _forget_written(device_state, call)
    return get_returned_arguments(call)


def _forget_written(device_state: DeviceState, call: OperatorCall) -> None:
    """Forget the known values of the tensors that `call` writes into."""
    for tensor in find_tensors(find_written_arguments(call)):
        device_state.values.store.drop(tensor.untyped_storage()._cdata)


def _record_growth(device_state: DeviceState, tensor: torch.Tensor, operator: OpInfo, site: CallSite) -> None:
    """Record that an operator resized `tensor`'s storage: CUDA frees the old block and allocates a new one."""
    storage, storages = tensor.untyped_storage(), device_state.recorder.storages
    index = storages.index_by_address.get(storage._cdata)
    device = (
        storages.device_by_empty_storage.get(storage, device_state.gpus.first)
        if index is None
        else device_state.recorder.trace.storages[index].device
    )
    if index is not None:
        storages.free(index)
    if storage.nbytes():
        device_state.record([tensor], operator.name, site, device)
