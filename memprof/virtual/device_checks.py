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
_ACCEPTS_SEVERAL_GPUS = frozenset({_aten.copy_, _aten._to_copy, _aten.set_, _aten.resize_as_})


def choose_gpu(device_state: DeviceState, operator: OpInfo, call: OperatorCall, site: CallSite) -> None:
    """Set the GPU on which `call` runs: the GPU of its first tensor on a GPU, else the requested GPU.

    Raises:
        RuntimeError: the tensors are on two GPUs, and the operator does not support that.
    """
    virtual_tensors = [tensor for tensor in call.tensors if tensor.is_meta]
    # An empty tensor has no storage in the trace, and so no known device, unless the program made it itself.
    devices = map(device_state.device_of, [tensor for tensor in virtual_tensors if tensor.numel()] or virtual_tensors)
    tensor_gpus = list(filter(is_gpu, devices))
    if not tensor_gpus:
        requested = device_state.factory_device
        call.gpu = (
            requested if requested is not None and is_gpu(requested) else device_state.autograd_nodes.get_current_gpu()
        )
        return
    call.gpu = tensor_gpus[0]
    device_state.autograd_nodes.note_gpu(tensor_gpus[0])
    # Operators on lists process the tensors one by one where they are on several GPUs (native/ForeachUtils.h).
    if (
        len(set(tensor_gpus)) > 1
        and operator.packet not in _ACCEPTS_SEVERAL_GPUS
        and not operator.name.startswith("aten._foreach_")
    ):
        note_mismatch(device_state, operator.name, call.tensors, site)
        raise RuntimeError(format_mismatch_error(operator.name, device_state.recorder.trace.mismatches[-1].operands))


def resolve_mixed_devices(device_state: DeviceState, operator: OpInfo, call: OperatorCall, site: CallSite) -> None:
    """Note `call` if it breaks CUDA's device rule; replace its host tensors by meta tensors, so that it can run."""
    if not call.on_gpu:
        # Small host tensors are real, large host tensors virtual: their mix is no mismatch.
        if any(t.dim() for t in call.real):
            _make_virtual(device_state, call)
    elif breaks_device_rule(device_state, operator, call):
        note_mismatch(device_state, operator.name, call.tensors, site)
        _make_virtual(device_state, call)


def breaks_device_rule(device_state: DeviceState, operator: OpInfo, call: OperatorCall) -> bool:
    """Return whether `call`, which runs on a GPU, raises in CUDA because some of its tensors are on the host."""
    host_tensors = [*call.real, *(t for t in call.tensors if t.is_meta and device_state.device_of(t) == HOST)]
    return not operator.mixes_devices and not all(operator.accepts_host_tensor(tensor) for tensor in host_tensors)


def _make_virtual(device_state: DeviceState, call: OperatorCall) -> None:
    """Replace the real host tensors of `call` by meta tensors, so that the call can run on meta."""

    def record_moved(tensor: torch.Tensor, moved: torch.Tensor) -> None:
        device_state.record_copy(moved)  # a sparse result may refer to the copy
        if device_state.values.store.is_trackable(moved):
            device_state.values.store.set(moved, tensor)

    call.set_arguments(to_meta(call.args, record_moved), to_meta(call.kwargs, record_moved), device_state)


def note_mismatch(
    device_state: DeviceState, op: str, tensors: list[torch.Tensor], site: CallSite | None = None
) -> None:
    """Record in the trace that a call of `op` on `tensors` raises on a real GPU because of their devices."""
    recorder = device_state.recorder
    site = site or recorder.attribution.find_call_site(sys._getframe(1))
    operands = tuple(_describe_operand(device_state, tensor) for tensor in tensors)
    recorder.trace.mismatches.append(
        DeviceMismatch(len(recorder.trace.events), recorder.writer.get_op_index(op), site.module, site.source, operands)
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
