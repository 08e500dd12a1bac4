"""Fake quantization, which training for quantized weights runs on the card: floats rounded as integers would be.

torch has no meta kernels for it. Sources: native/quantized/FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp,
cuda/FusedObsFakeQuant.cu.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten


@kernel(
    _aten.fake_quantize_per_tensor_affine_cachemask, _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
)
def per_tensor(launch: Launch) -> Any:
    """The result, and which elements were in range."""
    data, *rest = launch.args
    if not any(isinstance(argument, torch.Tensor) for argument in rest):
        launch.func(torch.empty(0), *rest)  # which says what is wrong with the range
    return _result_and_mask(launch, data)


def _result_and_mask(launch: Launch, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with launch.inside():
        return torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)


@kernel(_aten.fake_quantize_per_channel_affine_cachemask)
def per_channel(launch: Launch) -> Any:
    """The same, after the host has read the extremes of integer zero points."""
    data, _, zero_point = launch.args[:3]
    if not zero_point.is_floating_point():
        with launch.inside():
            _aten.aminmax.default(zero_point)
    return _result_and_mask(launch, data)


@kernel(_aten._fake_quantize_learnable_per_tensor_affine)
def learnable_per_tensor(launch: Launch) -> Any:
    """By a scale and a zero point that the host reads."""
    data, _, _, least, most = launch.args[:5]
    with launch.inside():
        return _aten.fake_quantize_per_tensor_affine_cachemask.default(data, 1.0, least, least, most)[0]


@kernel(_aten._fake_quantize_learnable_per_channel_affine)
def learnable_per_channel(launch: Launch) -> Any:
    """By rounded zero points."""
    data, scale, zero_point, axis, least, most = launch.args[:6]
    with launch.inside():
        rounded = zero_point.round().clamp_(least, most).to(torch.int32)
        return _aten.fake_quantize_per_channel_affine_cachemask.default(data, scale, rounded, axis, least, most)[0]


@kernel(
    _aten._fake_quantize_learnable_per_tensor_affine_backward,
    _aten._fake_quantize_learnable_per_channel_affine_backward,
)
def learnable_backward(launch: Launch) -> Any:
    """Gradients of scale and zero point are as large as the data, before they are summed."""
    grad, data, scale, zero_point = launch.args[:4]
    with launch.inside():
        if launch.operator.packet is _aten._fake_quantize_learnable_per_tensor_affine_backward:
            gradients = [torch.empty_like(data) for _ in range(3)]
            return gradients[0], *(each.sum().unsqueeze(0) for each in gradients[1:])
        axis, least, most = launch.args[4:7]
        if data.dtype is torch.bfloat16:
            grad, data, scale, zero_point = (each.float() for each in (grad, data, scale, zero_point))
        rounded = zero_point.round().clamp_(least, most)
        extremes = _aten.aminmax.default(rounded)
        gradients = [torch.empty_like(data) for _ in range(3)]
        others = [dim for dim in range(data.dim()) if dim != axis]
        result = gradients[0], *(each.sum(others) for each in gradients[1:])
        del extremes
        return result


@kernel(_aten._fused_moving_avg_obs_fq_helper)
def observed(launch: Launch) -> Any:
    """The data's extremes move the range, which the result is then made by; unused buffers get their size here."""
    data, _, is_on, *observers = launch.args[:7]
    least, most, axis = launch.args[8:11]
    by_row = launch.argument(11, "per_row_fake_quant", False)
    with launch.inside():
        dense = data.contiguous()
        if by_row:
            rows = data if data.dim() == 2 else data.transpose(0, axis).flatten(1)
            if not observers[0].numel():
                for observer, value in zip(observers, (math.inf, -math.inf, None, None), strict=True):
                    observer.resize_(data.shape[axis])
                    if value is not None:
                        observer.fill_(value)
            _aten.aminmax.default(rows, dim=1)
            del rows
        else:
            _aten.aminmax.default(dense)
        for observer in observers:
            launch.values.store.drop(observer.untyped_storage()._cdata)
        if not by_row:
            return _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default(
                data, *observers[2:], is_on, least, most
            )
        if launch.values.policy.read(is_on).any():
            return _aten.fake_quantize_per_channel_affine_cachemask.default(data, *observers[2:], axis, least, most)
        mask = torch.ones_like(data, dtype=torch.bool)
        return data.clone(), mask
