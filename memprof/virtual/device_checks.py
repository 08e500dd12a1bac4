"""Operators whose tensors are on several devices: the GPU on which they run, and calls that CUDA refuses.

A call that breaks the rule for host tensors (device_rules.py) is noted as a mismatch, and the run goes on as if the
host tensors had been moved. Tensors on two GPUs raise CUDA's error, since the intended GPU is unknown.
"""

from __future__ import annotations

import sys

import torch

from memprof.trace.events import HOST, DeviceMismatch, Operand, is_gpu
from memprof.trace.mismatch import format_mismatch_error
from memprof.virtual.device_state import DeviceState
from memprof.virtual.operator_call import OperatorCall, OpInfo, to_meta
from memprof.watch.forward import CallSite
from memprof.watch.wrappers import get_sparse_parts

_aten = torch.ops.aten
_TAKES_SEVERAL_GPUS = frozenset({_aten.copy_, _aten._to_copy, _aten.set_, _aten.resize_as_})


def settle_gpu(device_state: DeviceState, operator: OpInfo, call: OperatorCall, place: CallSite) -> None:
    """Set the GPU, one of several, on which `call` runs: the GPU of its first tensor, else the requested GPU.

    Raises:
        RuntimeError: the tensors are on two GPUs, and the operator does not support that.
    """
    virtual_tensors = [tensor for tensor in call.tensors if tensor.is_meta]
    # An empty tensor has no storage in the trace, and so no known device, unless the program made it itself.
    devices = map(device_state.device_of, [tensor for tensor in virtual_tensors if tensor.numel()] or virtual_tensors)
    gpus_of_tensors = list(filter(is_gpu, devices))
    if not gpus_of_tensors:
        requested = device_state.factory_device
        call.gpu = requested if requested is not None and is_gpu(requested) else device_state.nodes.current_gpu()
        return
    call.gpu = gpus_of_tensors[0]
    device_state.nodes.note_gpu(gpus_of_tensors[0])
    # Operators on lists process the tensors one by one where they are on several GPUs (native/ForeachUtils.h).
    if (
        len(set(gpus_of_tensors)) > 1
        and operator.packet not in _TAKES_SEVERAL_GPUS
        and not operator.name.startswith("aten._foreach_")
    ):
        note_mismatch(device_state, operator.name, call.tensors, place)
        raise RuntimeError(format_mismatch_error(operator.name, device_state.recorder.trace.mismatches[-1].operands))


def check_devices(device_state: DeviceState, operator: OpInfo, call: OperatorCall, place: CallSite) -> None:
    """Note a call that breaks CUDA's device rule; move its host tensors to meta where it needs that to run."""
    if not call.on_gpu:
        # Small host tensors are real, large host tensors virtual: their mix is no mismatch.
        if any(t.dim() for t in call.real):
            _make_virtual(device_state, call)
    elif breaks_rule(device_state, operator, call):
        note_mismatch(device_state, operator.name, call.tensors, place)
        _make_virtual(device_state, call)


def breaks_rule(device_state: DeviceState, operator: OpInfo, call: OperatorCall) -> bool:
    """Return whether CUDA refuses a call on the GPU because some of its tensors are on the host."""
    host_tensors = [*call.real, *(t for t in call.tensors if t.is_meta and device_state.device_of(t) == HOST)]
    return not operator.mixes_devices and not all(operator.takes_of_host(tensor) for tensor in host_tensors)


def _make_virtual(device_state: DeviceState, call: OperatorCall) -> None:
    """Replace the real host tensors of `call` by meta tensors, so that the call can run on meta."""

    def record_moved(tensor: torch.Tensor, moved: torch.Tensor) -> None:
        device_state.record_copy(moved)  # a sparse result may refer to the copy
        if device_state.values.store.is_trackable(moved):
            device_state.values.store.set(moved, tensor)

    call.set_arguments(to_meta(call.args, record_moved), to_meta(call.kwargs, record_moved), device_state)


def note_mismatch(
    device_state: DeviceState, op: str, tensors: list[torch.Tensor], place: CallSite | None = None
) -> None:
    """Note a call that raises on a real GPU, with the operator, its operands and the source line."""
    recorder = device_state.recorder
    place = place or recorder.attribution.find_call_site(sys._getframe(1))
    operands = tuple(_describe_operand(device_state, tensor) for tensor in tensors)
    recorder.trace.mismatches.append(
        DeviceMismatch(
            len(recorder.trace.events), recorder.writer.get_op_index(op), place.module, place.source, operands
        )
    )


def _describe_operand(device_state: DeviceState, tensor: torch.Tensor) -> Operand:
    tensor = next(iter(get_sparse_parts(tensor)), tensor)
    storage = tensor.untyped_storage()
    source = -1
    if tensor.is_meta:
        index = device_state.recorder.storages.index_by_address.get(storage._cdata)
        if index is not None:
            source = device_state.recorder.trace.storages[index].source
    else:
        ref, origin = device_state.host_sources.get(storage._cdata, (lambda: None, -1))
        if ref() is storage:
            source = origin
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(device_state.device_of(tensor), tuple(tensor.shape), dtype, source)
