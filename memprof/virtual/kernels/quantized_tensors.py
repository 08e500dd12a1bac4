"""torch's quantized tensors (of `quantize_per_tensor` and others), and fake quantization.

A virtual quantized tensor is torch's quantized tensor on the meta device, with a quantizer; the scales of a quantizer
per channel are virtual tensors. Operators on metadata (views, scales, schemes) have the same C++ for every device, and
run by the CPU's kernels. Sources: quantized/Quantizer.cpp, native/quantized/QTensor.cpp and TensorFactories.cpp,
native/quantized/cuda.

Fake quantization rounds floats to the values of integers, in training; torch has no meta kernels for it. Sources:
FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp and cuda/FusedObsFakeQuant.cu in native/quantized.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.torch_private import dispatch
from memprof.trace.events import HOST
from memprof.virtual.device_rules import find_missing_quantized_kernel
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import contiguous, suggest_layout
from memprof.virtual.kernels.registry import META, Table, aten, kernel
from memprof.virtual.limits import unsupported_error

_CPU = torch.DispatchKeySet(torch.DispatchKey.QuantizedCPU)
_has_kernel = dispatch.dispatch_has_kernel_for_dispatch_key

_PER_TENSOR, _PER_CHANNEL_FLOATS = 0, 4  # numbers of schemes (c10/core/QScheme.h)
# Names of CUDA's kernels by scheme.
_KERNEL_NAME_BY_SCHEME = {0: "per_tensor_affine", 1: "per_channel_affine", 4: "per_channel_float_qparams"}
# Dtypes that CUDA's kernels support (Dispatch.h, AT_DISPATCH_QINT_TYPES) -> dtype of the stored integers.
_STORAGE_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

_SUB_BYTE_DTYPES = {torch.quint4x2: "QUInt4x2", torch.quint2x4: "QUInt2x4"}

# Kernels, functions of (launch), of operators with a virtual quantized operand.
quantized_kernel = Table("kernel for quantized tensors")
# Operators with one C++ function for CPU and CUDA, which allocates by other operators.
_DEVICE_INDEPENDENT = frozenset(
    {
        *(aten.view, aten.as_strided, aten._reshape_alias, aten.unfold, aten.squeeze, aten.unsqueeze),
        *(aten.qscheme, aten.q_scale, aten.q_zero_point, aten.q_per_channel_scales, aten.q_per_channel_axis),
        *(aten.q_per_channel_zero_points, aten.empty_quantized, aten.empty_like, aten.set_, aten.max, aten.min),
    }
)


def run_quantized(launch: KernelContext) -> Any:
    """Run an operator on a virtual quantized tensor.

    Raises:
        NotImplementedError: CUDA has no kernel for the operator.
        MemprofError: the CUDA kernel is not simulated.
    """
    name = launch.func.name()
    missing_kernel = find_missing_quantized_kernel(name) if launch.device != HOST else ""
    if missing_kernel:
        raise _missing_kernel_error(missing_kernel, "QuantizedCUDA")
    found = quantized_kernel.get(launch.operator.packet)
    if found is not None:
        return found(launch)
    if launch.operator.packet in _DEVICE_INDEPENDENT:
        with launch.inside():
            return launch.func.redispatch(_CPU, *launch.args, **launch.kwargs)
    for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if _has_kernel(name, key):
            with launch.inside():
                return launch.func._op_dk(getattr(torch.DispatchKey, key), *launch.args, **launch.kwargs)
    raise unsupported_error(f"gives a quantized tensor to {launch.operator.name}", "dequantize it: `.dequantize()`")


def _missing_kernel_error(name: str, backend: str) -> NotImplementedError:
    """Return the error that c10/core/dispatch raises for a missing kernel (OperatorEntry.cpp, reportError)."""
    return NotImplementedError(
        f"Could not run '{name}' with arguments from the '{backend}' backend. This could be because the operator "
        "doesn't exist for this backend, or was omitted during the selective/custom build process (if using custom "
        "build)."
    )


def _unsupported_dtype_error(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel}\" not implemented for '{_SUB_BYTE_DTYPES[dtype]}'")


def _choose_layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of the result of quantizing or dequantizing `tensor`."""
    with_floats = tensor.is_quantized and _get_scheme(tensor) == _PER_CHANNEL_FLOATS
    return torch.contiguous_format if with_floats else suggest_layout(tensor)


def _get_scheme(tensor: torch.Tensor) -> int:
    return aten.qscheme.default.redispatch(_CPU, tensor)  # type: ignore[no-any-return]


def _get_quantizer_parameters(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for a quantizer as of `tensor`, which is virtual or on the CPU."""

    def query(operator: Any) -> Any:
        return operator.default.redispatch(_CPU, tensor)

    if _get_scheme(tensor) == _PER_TENSOR:
        return {"scale": query(aten.q_scale), "zero_point": query(aten.q_zero_point)}
    return {
        "scales": query(aten.q_per_channel_scales),
        "zero_points": query(aten.q_per_channel_zero_points),
        "axis": query(aten.q_per_channel_axis),
    }


def _make_quantized(
    launch: KernelContext,
    size: Any,
    dtype: torch.dtype,
    layout: torch.memory_format,
    device: Any = None,
    **parameters: Any,
) -> Any:
    """Return a new virtual quantized tensor. Scales and zero points per channel are float64 and int64, or both float32
    (make_per_channel_affine_quantizer)."""
    operator = aten._empty_affine_quantized
    if "axis" in parameters:
        operator = aten._empty_per_channel_affine_quantized
        floats = parameters["zero_points"].is_floating_point()
        with launch.inside():
            for name, default_dtype in (("scales", torch.float64), ("zero_points", torch.int64)):
                parameters[name] = parameters[name].to(torch.float32 if floats else default_dtype).contiguous()
    result = operator.default.redispatch(_CPU, size, dtype=dtype, device=META, memory_format=layout, **parameters)
    launch.record(result, device=device)
    return result


@kernel(aten._empty_affine_quantized, aten._empty_per_channel_affine_quantized, on_host=True)
def empty(launch: KernelContext) -> Any:
    """Make a quantized tensor without values."""
    device = launch.kwargs.get("device")
    if device is None or device.type != "meta":
        return launch.func(*launch.args, **launch.kwargs)
    named = {k: v for k, v in launch.kwargs.items() if k in ("scale", "zero_point", "scales", "zero_points", "axis")}
    named.update(zip(("scales", "zero_points", "axis"), launch.args[1:], strict=False))
    layout = launch.kwargs.get("memory_format") or torch.contiguous_format
    return _make_quantized(launch, launch.args[0], launch.kwargs["dtype"], layout, **named)


@kernel(aten.quantize_per_tensor, aten.quantize_per_channel, aten.quantize_per_tensor_dynamic, on_host=True)
def quantize(launch: KernelContext) -> Any:
    """Make the quantized tensor, then a contiguous copy of the data; dynamic quantization first computes extremes."""
    data, *rest = launch.args
    if not isinstance(data, torch.Tensor) and launch.device != HOST and launch.call.on_gpu:
        raise _missing_kernel_error(launch.func.name(), "CUDA")
    if not isinstance(data, torch.Tensor) or not data.is_meta:
        return launch.func(*launch.args)
    is_dynamic = launch.operator.packet is aten.quantize_per_tensor_dynamic
    if is_dynamic:
        with launch.inside():
            dense = data.contiguous()
            dense.min(), dense.max()
            del dense
    # A small CPU tensor is quantized with the same arguments, for the quantizer and for errors in the arguments.
    size = [1] if is_dynamic else [0] * data.dim()
    if launch.operator.packet is aten.quantize_per_channel:
        size[rest[2]] = data.shape[rest[2]]
    known = [launch.values.policy.read(value) if isinstance(value, torch.Tensor) else value for value in rest]
    sample = launch.func(torch.ones(size, dtype=data.dtype), *known)
    if not sample.is_quantized:
        with launch.inside():
            return data.contiguous().to(sample.dtype)
    if launch.device != HOST and sample.dtype not in _STORAGE_DTYPES:
        name = _KERNEL_NAME_BY_SCHEME[_get_scheme(sample)]
        raise _unsupported_dtype_error(f"quantize_tensor_{name}_cuda", sample.dtype)
    parameters = _get_quantizer_parameters(sample)
    if "axis" in parameters:
        parameters.update(scales=rest[0], zero_points=rest[1])
    layout = _choose_layout(data) if _get_scheme(sample) != _PER_CHANNEL_FLOATS else torch.contiguous_format
    result = _make_quantized(launch, data.shape, sample.dtype, layout, **parameters)
    launch.transients(*contiguous(data, layout=layout))
    return result


@kernel("aten._make_per_tensor_quantized_tensor", "aten._make_per_channel_quantized_tensor")
def wrap_integers(launch: KernelContext) -> Any:
    """Make a quantized tensor of given integers (native/quantized/cuda/MakePerTensorQuantizedTensor.cu)."""
    data, *rest = launch.args
    names = ("scale", "zero_point") if len(rest) == 2 else ("scales", "zero_points", "axis")
    dtype = next(kind for kind, plain in _STORAGE_DTYPES.items() if plain is data.dtype)
    return _make_quantized(launch, data.shape, dtype, torch.contiguous_format, **dict(zip(names, rest, strict=True)))


@kernel(aten.dequantize)
def dequantize_floats(launch: KernelContext) -> Any:
    """Run `dequantize` on a tensor that is not quantized: convert to float32."""
    if not isinstance(launch.args[0], torch.Tensor):
        raise _missing_kernel_error(launch.func.name(), "CUDA")
    with launch.inside():
        return launch.args[0].to(torch.float32)


@quantized_kernel(aten.dequantize)
def dequantize(launch: KernelContext) -> Any:
    """Make the float32 result, then a contiguous copy of the integers."""
    data = launch.args[0]
    layout = _choose_layout(data)
    result = launch.new(data.shape, torch.float32, layout)
    launch.transients(*contiguous(data, layout=layout))
    return result


@quantized_kernel(aten.int_repr)
def int_repr(launch: KernelContext) -> Any:
    """Make a tensor of the stored integers (native/quantized/cuda/IntReprQuant.cu)."""
    data = launch.args[0]
    if data.dtype not in _STORAGE_DTYPES:
        raise _unsupported_dtype_error("int_repr", data.dtype)
    return launch.new(data.shape, _STORAGE_DTYPES[data.dtype], suggest_layout(data))


@quantized_kernel(aten.clone, aten.flip, aten.index_select)
def copy_quantizer(launch: KernelContext) -> Any:
    """Make the result, a quantized tensor with the quantizer of the input."""
    data, *rest = launch.args
    size, layout = list(data.shape), launch.kwargs.get("memory_format") or torch.contiguous_format
    if launch.operator.packet is aten.index_select:
        size[rest[0]] = rest[1].numel()
    elif layout is torch.preserve_format or launch.operator.packet is aten.flip:
        layout = suggest_layout(data)
    return _make_quantized(launch, size, data.dtype, layout, **_get_quantizer_parameters(data))


@quantized_kernel(aten._to_copy)
def to_copy(launch: KernelContext) -> Any:
    """Copy to another device with the scales (TensorConversions.cpp, empty_quantized); a copy to the host is ones."""
    data, device = launch.args[0], launch.kwargs.get("device")
    if launch.kwargs.get("dtype", data.dtype) is not data.dtype:
        raise RuntimeError(_COPY_TO_FLOAT_ERROR)
    parameters = _get_quantizer_parameters(data)
    device_argument = {} if device is None else {"device": device}
    with launch.inside():
        for name in ("scales", "zero_points"):
            if name in parameters:
                parameters[name] = aten._to_copy.default(parameters[name], **device_argument)
    if device is None or device.type == "meta":
        target = launch.device_state.factory_device if device is not None else None
        return _make_quantized(launch, data.shape, data.dtype, suggest_layout(data), target, **parameters)
    operator = aten._empty_per_channel_affine_quantized if "axis" in parameters else aten._empty_affine_quantized
    result = operator(data.shape, dtype=data.dtype, **parameters).fill_(1.0)
    launch.record_real(result)
    return result


_COPY_TO_FLOAT_ERROR = (
    "Copying from quantized Tensor to non-quantized Tensor is not allowed, please use dequantize to get a float Tensor "
    "from a quantized Tensor"
)


@quantized_kernel(aten.copy_)
def copy_(launch: KernelContext) -> Any:
    """Copy into a quantized tensor (native/Copy.cpp, copy_impl)."""
    if not launch.args[0].is_quantized:
        raise RuntimeError(_COPY_TO_FLOAT_ERROR)
    return launch.args[0]


@quantized_kernel(aten.masked_fill_, aten._index_put_impl_, aten.relu_, aten.fill_)
def update_in_place(launch: KernelContext) -> Any:
    """Allocate nothing, except in `fill_`: floats of the tensor's size (native/Fill.cpp, fill_quantized_)."""
    if launch.operator.packet is aten.fill_:
        launch.transients(4 * launch.args[0].numel())
    return launch.args[0]


@quantized_kernel(aten.gelu, aten._adaptive_avg_pool2d)
def compute_in_floats(launch: KernelContext) -> Any:
    """Dequantize, compute and quantize again (native/quantized/cuda/Activation.cpp, cudnn/Pooling.cpp)."""
    data, *rest = launch.args
    with launch.inside():
        floats = aten.dequantize.self(data)
        result = launch.func(floats, *rest)
        return aten.quantize_per_tensor.default(result, *_get_quantizer_parameters(data).values(), data.dtype)


@quantized_kernel(aten.relu)
def relu(launch: KernelContext) -> Any:
    """Make the maximum of the integers and the zero point (native/quantized/cuda/Activation.cpp)."""
    scale, zero_point = _get_quantizer_parameters(launch.args[0]).values()
    with launch.inside():
        integers = aten.int_repr.default(launch.args[0])
        mask = integers > zero_point
        positive = aten.where.ScalarOther(mask, integers, zero_point)
        return aten._make_per_tensor_quantized_tensor.default(positive, scale, zero_point)


@quantized_kernel(aten.quantized_max_pool2d, "quantized.max_pool2d")
def max_pool2d(launch: KernelContext) -> Any:
    """Pool channels-last images, or a channels-last copy of other images (native/quantized/cudnn/Pooling.cpp)."""
    data, *rest = launch.args
    layout = torch.channels_last if data.dim() == 4 else torch.contiguous_format
    size = aten.max_pool2d_with_indices(torch.empty(data.shape, device=META), *rest)[0].shape
    with launch.scratch(*contiguous(data, layout=layout)):
        return _make_quantized(launch, size, torch.qint8, layout, **_get_quantizer_parameters(data))


@quantized_kernel("quantized.add", "quantized.add_relu")
def add(launch: KernelContext) -> Any:
    """Add by a sum and two factors in float32, each as large as an operand (native/quantized/cudnn/BinaryOps.cpp)."""
    data, _, scale, zero_point = launch.args
    floats = 4 * data.numel()
    with launch.scratch(floats):
        quantizer = {"scale": scale, "zero_point": zero_point}
        result = _make_quantized(launch, data.shape, torch.qint8, torch.contiguous_format, **quantizer)
        launch.transients(floats, floats)
    return result


@kernel(aten.fake_quantize_per_tensor_affine_cachemask, aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def fake_quantize_per_tensor(launch: KernelContext) -> Any:
    """Make the result, and the mask of the elements in range."""
    data, *rest = launch.args
    if not any(isinstance(argument, torch.Tensor) for argument in rest):
        launch.func(torch.empty(0), *rest)  # raises the error of a wrong range
    return _make_result_and_mask(launch, data)


def _make_result_and_mask(launch: KernelContext, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with launch.inside():
        return torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)


@kernel(aten.fake_quantize_per_channel_affine_cachemask)
def fake_quantize_per_channel(launch: KernelContext) -> Any:
    """Make result and mask of a quantization by channel; the host first reads extremes of integer zero points."""
    data, _, zero_point = launch.args[:3]
    if not zero_point.is_floating_point():
        with launch.inside():
            aten.aminmax.default(zero_point)
    return _make_result_and_mask(launch, data)


@kernel(aten._fake_quantize_learnable_per_tensor_affine)
def learnable_per_tensor(launch: KernelContext) -> Any:
    """Make the result for a scale and a zero point that the host reads."""
    data, _, _, quant_min, quant_max = launch.args[:5]
    with launch.inside():
        return aten.fake_quantize_per_tensor_affine_cachemask.default(data, 1.0, quant_min, quant_min, quant_max)[0]


@kernel(aten._fake_quantize_learnable_per_channel_affine)
def learnable_per_channel(launch: KernelContext) -> Any:
    """Make the result of a quantization by channel, with rounded zero points."""
    data, scale, zero_point, axis, quant_min, quant_max = launch.args[:6]
    with launch.inside():
        rounded = zero_point.round().clamp_(quant_min, quant_max).to(torch.int32)
        return aten.fake_quantize_per_channel_affine_cachemask.default(
            data, scale, rounded, axis, quant_min, quant_max
        )[0]


@kernel(
    aten._fake_quantize_learnable_per_tensor_affine_backward,
    aten._fake_quantize_learnable_per_channel_affine_backward,
)
def learnable_backward(launch: KernelContext) -> Any:
    """Make the gradients; those of scale and zero point are as large as the data before the sum."""
    grad, data, scale, zero_point = launch.args[:4]
    with launch.inside():
        if launch.operator.packet is aten._fake_quantize_learnable_per_tensor_affine_backward:
            gradients = [torch.empty_like(data) for _ in range(3)]
            return gradients[0], *(each.sum().unsqueeze(0) for each in gradients[1:])
        axis, quant_min, quant_max = launch.args[4:7]
        if data.dtype is torch.bfloat16:
            grad, data, scale, zero_point = (each.float() for each in (grad, data, scale, zero_point))
        rounded = zero_point.round().clamp_(quant_min, quant_max)
        extremes = aten.aminmax.default(rounded)
        gradients = [torch.empty_like(data) for _ in range(3)]
        summed_dims = [dim for dim in range(data.dim()) if dim != axis]
        result = gradients[0], *(each.sum(summed_dims) for each in gradients[1:])
        del extremes
        return result


@kernel(aten._fused_moving_avg_obs_fq_helper)
def update_range_and_quantize(launch: KernelContext) -> Any:
    """Update the range by the extremes of the data, and quantize by the range; empty buffers are resized first."""
    data, _, fake_quant_on, *observers = launch.args[:7]
    quant_min, quant_max, axis = launch.args[8:11]
    is_per_row = launch.argument(11, "per_row_fake_quant", False)
    with launch.inside():
        dense = data.contiguous()
        if is_per_row:
            rows = data if data.dim() == 2 else data.transpose(0, axis).flatten(1)
            if not observers[0].numel():
                for observer, value in zip(observers, (math.inf, -math.inf, None, None), strict=True):
                    observer.resize_(data.shape[axis])
                    if value is not None:
                        observer.fill_(value)
            aten.aminmax.default(rows, dim=1)
            del rows
        else:
            aten.aminmax.default(dense)
        for observer in observers:
            launch.values.store.drop(observer.untyped_storage()._cdata)
        if not is_per_row:
            return aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default(
                data, *observers[2:], fake_quant_on, quant_min, quant_max
            )
        if launch.values.policy.read(fake_quant_on).any():
            return aten.fake_quantize_per_channel_affine_cachemask.default(
                data, *observers[2:], axis, quant_min, quant_max
            )
        mask = torch.ones_like(data, dtype=torch.bool)
        return data.clone(), mask
