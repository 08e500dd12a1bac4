"""Operators that need more than "run it on meta and record what it made".

Reads of values, copies between host and card, shapes that depend on values, and the places where the meta kernel or an
active mode would do otherwise than CUDA. A handler returns NotImplemented for a call that is ordinary after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from memprof.trace.events import GPU, HOST
from memprof.virtual.calls import HOST_VIRTUAL_BYTES, Call, Kind, Operator, tensors_of
from memprof.virtual.engine import in_backward
from memprof.virtual.kernels import (
    attention,
    batch_norm,
    convolution,
    embedding,
    losses,
    norms,
    recurrent,
    selection,
    sorting,
)
from memprof.virtual.kernels import (
    missing_meta as layouts,
)

if TYPE_CHECKING:
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")


def _add(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The engine's own accumulation of two gradients is in place on a run without modes: see engine.py."""
    if in_backward() and mode.accumulation.is_in_place(
        call.args, call.kwargs, mode.recorder.made_by_node(call.args[0].untyped_storage())
    ):
        call.args[0].add_(call.args[1])
        return call.args[0]
    # The other way round, and so no result of a product, is what vmap makes of an addmm.
    if mode.adds_bias and not in_backward() and _holds_sum(call.args[0], call.args[1]):
        # composites.py: autograd sees an addition, so it is given another tensor on the same storage.
        call.args[0].add_(call.args[1])
        return call.args[0].detach()
    return NotImplemented


def _holds_sum(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == torch.broadcast_shapes(one.shape, other.shape)


def _local_scalar(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    return mode.values.read(call.args[0]).item()


def _equal(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    known = mode.values.compute(call.func, call.args, call.kwargs)
    return False if known is None else known


def _lift_fresh(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The last act of `torch.tensor` and its like (utils/tensor_new.cpp), which make the tensor where no mode sees it.

    Memory that belongs to another library (torch.from_numpy) cannot be resized: it is not counted.
    """
    made = call.args[0]
    if not made.is_meta and made.dim() and made.device.type == "cpu" and made.untyped_storage().resizable():
        mode.record_real(made, operator.name, place)
    return call.func(*call.args, **call.kwargs)


def _grouped_mm(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """CUDA takes any floating-point dtype (native/cuda/GroupedBlas.cpp); the meta kernel knows bfloat16 alone."""
    dtype = call.args[0].dtype
    if dtype is torch.bfloat16 or not call.args[0].is_meta:
        return NotImplemented

    def as_bfloat16(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.empty_strided(value.size(), value.stride(), dtype=torch.bfloat16, device=_META)
        return torch.bfloat16 if value is dtype else value

    shape = call.func(*map(as_bfloat16, call.args), **{k: as_bfloat16(v) for k, v in call.kwargs.items()})
    result = torch.empty_strided(shape.size(), shape.stride(), dtype=dtype, device=_META)
    mode.record([result], operator.name, place, call.device or GPU)
    return result


def _to_copy(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    source = call.args[0]
    device = call.kwargs.get("device")
    if device is None or (device.type == "cpu") == (not source.is_meta) or (device.type == "meta" and source.is_meta):
        return NotImplemented
    dtype = call.kwargs.get("dtype") or source.dtype
    if not source.is_meta:
        # Host to GPU: the values travel along.
        result = torch.empty_like(source, dtype=dtype, device=_META)
        if mode.factory_device != "meta":
            mode.record([result], operator.name, place, GPU)
            if mode.values.wants(result):
                mode.values.set(result, source.to(dtype))
        return result
    if source.numel() * dtype.itemsize >= HOST_VIRTUAL_BYTES and mode.values.get(source) is None:
        result = torch.empty_like(source, dtype=dtype)
        mode.record([result], operator.name, place, HOST)
        return result
    result = mode.values.read(source).to(dtype, copy=True)
    mode.record_real(result, operator.name, place)
    return result


def _copy(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    target, source = call.args[0], call.args[1]
    if target.is_meta == source.is_meta and target.is_meta:
        return NotImplemented
    if target.is_meta:
        if mode.values.wants(target):
            mode.values.write(call.func, (target, source), {}, target)
        return target
    if source.is_meta:
        target.copy_(mode.values.read(source))
        return target
    return NotImplemented


def _nonzero(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    if not call.tensors[0].is_meta:
        return NotImplemented
    indices = mode.values.selected(call.args[0])
    result = _known_result(mode, indices, operator, place, call)
    if call.on_gpu:
        mode.transients(sorting.nonzero(call.args[0].numel()), operator, place)
    return result


def _index(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Indexing by a mask is indexing by its nonzero indices, which CUDA allocates for the time of the call."""
    indices = call.args[1]
    if not call.args[0].is_meta and any(i is not None and i.is_meta for i in indices):
        # A host tensor may not be indexed by device tensors: the CPU kernel would read memory that is not there.
        mode.note_mismatch(operator, call, place)
        real = [None if i is None else mode.values.read(i) for i in indices]
        rest = [mode.values.read(a) if isinstance(a, torch.Tensor) else a for a in call.args[2:]]
        return call.func(call.args[0], real, *rest, **call.kwargs)
    value = call.args[2] if len(call.args) > 2 else None
    if isinstance(value, torch.Tensor) and not value.is_meta and value.numel() > 1 and call.args[0].is_meta:
        # One number may be on the host, several may not (native/TensorAdvancedIndexing.cpp).
        mode.note_mismatch(operator, call, place)
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks or not (call.on_gpu or call.on_host):
        return NotImplemented
    if operator.kind is Kind.IN_PLACE and _fills_a_mask(indices, masks, call):
        mode.values.write(call.func, call.args, call.kwargs, call.args[0])
        return call.args[0]
    device = call.device or GPU
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        columns = mode.values.selected(index)
        if device == GPU:
            mode.transients(sorting.nonzero(index.numel()), operator, place)
        # One tensor of all coordinates, whose columns are the indices (IndexingUtils.h, expandTensors).
        virtual = torch.empty(tuple(columns.shape)[::-1], dtype=torch.int64, device=_META)
        mode.record([virtual], "aten.nonzero", place, device)
        expanded += virtual.unbind(0)
    args = (call.args[0], expanded, *call.args[2:])
    if operator.kind is Kind.IN_PLACE:
        mode.values.write(call.func, call.args, call.kwargs, call.args[0])
        return call.func(*args, **call.kwargs)
    result = call.func(*args, **call.kwargs)
    mode.record(tensors_of(result), operator.name, place, device)
    mode.values.learn(call.func, call.args, call.kwargs, tensors_of(result))
    return result


def _fills_a_mask(indices: Any, masks: list[torch.Tensor], call: Call) -> bool:
    """Whether `x[mask] = number` is masked_fill_, which needs no indices: one mask and nothing else, and a number that
    is on the host, as Python's are (native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill)."""
    value = call.args[2]
    accumulates = call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)
    alone = len(masks) == 1 and all(index is None or index is masks[0] for index in indices)
    return alone and not accumulates and not value.is_meta and value.numel() == 1


def _by_value(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Operators whose output's shape depends on values: run on the values, or as if all elements differed."""
    if not (call.on_gpu or call.on_host):
        return NotImplemented
    result = mode.values.compute(call.func, call.args, call.kwargs)
    if result is None:
        known = [None if not isinstance(a, torch.Tensor) else a for a in call.args]
        first = next(a for a in known if a is not None)
        stand_in = torch.arange(first.numel()).reshape(first.shape).to(first.dtype)
        mode.values.assume(f"{operator.name} of unknown values: as if all elements differed.")
        result = call.func(stand_in, *call.args[1:], **call.kwargs)
    return _known_result(mode, result, operator, place, call)


def _known_result(mode: RecordingMode, result: Any, operator: Operator, place: Place, call: Call) -> Any:
    device = call.device or GPU

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        lifted = torch.empty(value.shape, dtype=value.dtype, device=_META)
        mode.record([lifted], operator.name, place, device)
        if mode.values.wants(lifted):
            mode.values.set(lifted, value)
        return lifted

    return tree_map(lift, result)


def _native_dropout(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """CUDA keeps a boolean mask (native/cuda/Dropout.cu); the meta kernel would keep one in the input's dtype."""
    data = call.args[0]
    if not data.is_meta:
        return NotImplemented
    result = (torch.empty_like(data), torch.empty_like(data, dtype=torch.bool))
    mode.record(list(result), operator.name, place, call.device or GPU)
    return result


def _log_sigmoid_forward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The buffer for the backward is empty on CUDA (native/cuda/Activation.cpp); the CPU fills one."""
    data = call.args[0]
    if not data.is_meta or not call.on_gpu:
        return NotImplemented
    result = (torch.empty_like(data), data.new_empty(0))
    mode.record(list(result), operator.name, place, GPU)
    return result


def _masked_fill(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """CUDA fills with a number that lies on the host (native/cuda/Indexing.cu); the meta kernel would not take it."""
    data, mask, value = call.args
    if not data.is_meta or not isinstance(value, torch.Tensor) or value.is_meta or value.dim():
        return NotImplemented
    return _again(mode, call.func.overloadpacket.Scalar, (data, mask, value.item()))


def _again(mode: RecordingMode, func: Any, args: Any) -> Any:
    """The same by another overload, which the mode has to see."""
    with mode:
        return func(*args)


def _restride(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """These change the shape or strides of the very tensor: to be done each time, however often seen before."""
    return call.func(*call.args, **call.kwargs)


def _ctc_loss(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Loss per sample and the alignments' log probabilities alpha (native/cuda/LossCTC.cu, ctc_loss_gpu_template)."""
    log_probs, targets, _, target_lengths = call.args[:4]
    if not log_probs.is_meta:
        return NotImplemented
    frames, batch = log_probs.shape[0], log_probs.shape[1]
    known = (
        mode.values.get(target_lengths) if isinstance(target_lengths, torch.Tensor) else torch.tensor(target_lengths)
    )
    if known is not None:
        longest = int(known.max()) if known.numel() else 0
    else:
        mode.values.assume("CTC targets whose lengths are not known are all as long as they can be.")
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
    alpha = torch.empty(batch, frames, 2 * longest + 1, dtype=log_probs.dtype, device=_META)
    loss = torch.empty(batch, dtype=log_probs.dtype, device=_META)
    # The lengths go to the card as int64 (both), and so do the offsets of the targets.
    mode.transients(3 * [8 * batch], operator, place)
    mode.record([alpha, loss], operator.name, place, call.device or GPU)
    return loss, alpha


def _ctc_loss_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """A gradient like the log probabilities; beta, as large as alpha, lives while it runs (native/cuda/LossCTC.cu)."""
    log_probs, alpha = call.args[1], call.args[6]
    if not log_probs.is_meta:
        return NotImplemented
    result = torch.empty(log_probs.shape, dtype=log_probs.dtype, device=_META)
    beta = mode.recorder.allocate_hidden(alpha.numel() * alpha.element_size(), operator.name, place, GPU)
    mode.record([result], operator.name, place, call.device or GPU)
    mode.transients(3 * [8 * log_probs.shape[1]], operator, place)
    mode.recorder.free_hidden(beta)
    return result


_RESTRIDES = (
    "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "detach_",
)  # fmt: skip
HANDLERS: dict[Any, Any] = {
    _aten.add: _add,
    _aten._local_scalar_dense: _local_scalar,
    _aten.equal: _equal,
    _aten.lift_fresh: _lift_fresh,
    _aten._to_copy: _to_copy,
    _aten.copy_: _copy,
    _aten.nonzero: _nonzero,
    _aten.index: _index,
    _aten.index_put_: _index,
    _aten._index_put_impl_: _index,
    _aten._unique2: _by_value,
    _aten.unique_dim: _by_value,
    _aten.unique_consecutive: _by_value,
    _aten.bincount: _by_value,
    _aten.repeat_interleave: _by_value,
    _aten.native_dropout: _native_dropout,
    _aten.log_sigmoid_forward: _log_sigmoid_forward,
    _aten.masked_fill: _masked_fill,
    _aten.masked_fill_: _masked_fill,
    _aten._ctc_loss: _ctc_loss,
    _aten._ctc_loss_backward: _ctc_loss_backward,
    **convolution.HANDLERS,
    **embedding.HANDLERS,
    **norms.HANDLERS,
    **layouts.HANDLERS,
    **losses.HANDLERS,
    **selection.HANDLERS,
    **attention.HANDLERS,
    **batch_norm.HANDLERS,
    **recurrent.HANDLERS,
    **{getattr(_aten, name): _restride for name in _RESTRIDES},
    **({_aten._grouped_mm: _grouped_mm} if hasattr(_aten, "_grouped_mm") else {}),
}
