"""Operators whose tensors are on several devices: on which GPU they run, and what is noted where CUDA refuses them.

What breaks the rule of the host (device_rules.py) is noted as a mismatch, and the run goes on as if the host tensors
had been moved; of two GPUs it raises what CUDA raises, for which was meant is not known.
"""

from __future__ import annotations

import sys

import torch

from memprof.trace.events import HOST, DeviceMismatch, Operand, is_gpu
from memprof.trace.mismatch import mismatch_error
from memprof.virtual.device_state import DeviceState
from memprof.virtual.operator_call import OperatorCall, OpInfo, to_meta
from memprof.watch.forward import CallSite
from memprof.watch.wrappers import parts_of_sparse

_aten = torch.ops.aten
_TAKES_SEVERAL_GPUS = frozenset({_aten.copy_, _aten._to_copy, _aten.set_, _aten.resize_as_})


def settle_gpu(machine: DeviceState, operator: OpInfo, call: OperatorCall, place: CallSite) -> None:
    """Say on which of several GPUs `call` runs: that of its first tensor, else the one that was requested.

    Raises:
        RuntimeError: its tensors are on two GPUs, and no kernel takes that.
    """
    meant = [tensor for tensor in call.tensors if tensor.is_meta]
    # What is empty has no memory that would say where it is, unless the program made it itself.
    devices = map(machine.device_of, [tensor for tensor in meant if tensor.numel()] or meant)
    on = list(filter(is_gpu, devices))
    if not on:
        asked = machine.factory_device
        call.gpu = asked if asked is not None and is_gpu(asked) else machine.nodes.current_gpu()
        return
    call.gpu = on[0]
    machine.nodes.note_gpu(on[0])
    # Lists of tensors are gone through one by one where they are on several GPUs (native/ForeachUtils.h).
    if (
        len(set(on)) > 1
        and operator.packet not in _TAKES_SEVERAL_GPUS
        and not operator.name.startswith("aten._foreach_")
    ):
        note_mismatch(machine, operator.name, call.tensors, place)
        raise RuntimeError(mismatch_error(operator.name, machine.recorder.trace.mismatches[-1].operands))


def check_devices(machine: DeviceState, operator: OpInfo, call: OperatorCall, place: CallSite) -> None:
    """Note a breach of CUDA's rule, and move host tensors to meta where `call` could not run otherwise."""
    if not call.on_gpu:
        # Host tensors among themselves: the small ones are real, the large ones virtual; no mismatch.
        if any(t.dim() for t in call.real):
            _make_virtual(machine, call)
    elif breaks_rule(machine, operator, call):
        note_mismatch(machine, operator.name, call.tensors, place)
        _make_virtual(machine, call)


def breaks_rule(machine: DeviceState, operator: OpInfo, call: OperatorCall) -> bool:
    """Return whether CUDA refuses a call on the GPU for its tensors of the host."""
    strangers = [*call.real, *(t for t in call.tensors if t.is_meta and machine.device_of(t) == HOST)]
    return not operator.mixes_devices and not all(operator.takes_of_host(tensor) for tensor in strangers)


def _make_virtual(machine: DeviceState, call: OperatorCall) -> None:
    """Replace the real host tensors of `call` by meta ones, so that it can run on meta."""

    def lend(tensor: torch.Tensor, moved: torch.Tensor) -> None:
        machine.record_copy(moved)  # a sparse result may be made of it
        if machine.values.store.is_trackable(moved):
            machine.values.store.set(moved, tensor)

    call.set_arguments(to_meta(call.args, lend), to_meta(call.kwargs, lend), machine)


def note_mismatch(machine: DeviceState, op: str, tensors: list[torch.Tensor], place: CallSite | None = None) -> None:
    """Note a call that raises on a real GPU: what it was given, and where from."""
    recorder = machine.recorder
    place = place or recorder.attribution.place(sys._getframe(1))
    operands = tuple(_operand(machine, tensor) for tensor in tensors)
    recorder.trace.mismatches.append(
        DeviceMismatch(len(recorder.trace.events), recorder.writer.op_index(op), place.module, place.source, operands)
    )


def _operand(machine: DeviceState, tensor: torch.Tensor) -> Operand:
    tensor = next(iter(parts_of_sparse(tensor)), tensor)
    storage = tensor.untyped_storage()
    source = -1
    if tensor.is_meta:
        index = machine.recorder.storages.live.get(storage._cdata)
        if index is not None:
            source = machine.recorder.trace.storages[index].source
    else:
        ref, origin = machine.host_sources.get(storage._cdata, (lambda: None, -1))
        if ref() is storage:
            source = origin
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(machine.device_of(tensor), tuple(tensor.shape), dtype, source)
