"""torch's quantized tensors (of `quantize_per_tensor` and others), and fake quantization.

A virtual quantized tensor is torch's quantized tensor on the meta device, with a quantizer. If it is quantized per
channel, the quantizer's scales are virtual tensors. Operators on metadata (views, scales, schemes) have the same C++
for every device, and run as CPU kernels. Sources: quantized/Quantizer.cpp, native/quantized/QTensor.cpp and
TensorFactories.cpp, native/quantized/cuda.

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
from memprof.virtual.kernels.copies import copy_bytes, suggest_layout
from memprof.virtual.kernels.registry import META, OperatorTable, aten, kernel
from memprof.virtual.limits import unsupported_error

_CPU = torch.DispatchKeySet(torch.DispatchKey.QuantizedCPU)
_has_kernel = dispatch.dispatch_has_kernel_for_dispatch_key

_PER_TENSOR, _PER_CHANNEL_FLOATS = 0, 4  # values of QScheme (c10/core/QScheme.h)
# Names of CUDA's kernels by scheme.
_KERNEL_NAME_BY_SCHEME = {0: "per_tensor_affine", 1: "per_channel_affine", 4: "per_channel_float_qparams"}
# Dtypes that CUDA's kernels support (Dispatch.h, AT_DISPATCH_QINT_TYPES) -> dtype of the stored integers.
_STORAGE_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

_SUB_BYTE_DTYPE_NAMES = {torch.quint4x2: "QUInt4x2", torch.quint2x4: "QUInt2x4"}

# Kernels, functions of (launch), of operators with a virtual quantized operand.
quantized_kernel = OperatorTable("kernel for quantized tensors")
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
        NotImplementedError: torch has no CUDA kernel for the operator.
        MemprofError: memprof does not simulate the CUDA kernel.
    """
    name = launch.func.name()
    missing_kernel = find_missing_quantized_kernel(name) if launch.device != HOST else ""
    if missing_kernel:
        raise _missing_kernel_error(missing_kernel, "QuantizedCUDA")
    quantized_function = quantized_kernel.get(launch.operator.packet)
    if quantized_function is not None:
        return quantized_function(launch)
    if launch.operator.packet in _DEVICE_INDEPENDENT:
        with launch.inside():
            return launch.func.redispatch(_CPU, *launch.args, **launch.kwargs)
    for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if _has_kernel(name, key):
            with launch.inside():
                return launch.func._op_dk(getattr(torch.DispatchKey, key), *launch.args, **launch.kwargs)
    raise unsupported_error(f"gives a quantized tensor to {launch.operator.name}", "dequantize it: `.dequantize()`")


def _missing_kernel_error(name: str, backend: str) -> NotImplementedError:
    """Return the error that torch raises for a missing kernel (OperatorEntry.cpp, reportError)."""
    return NotImplementedError(
        f"Could not run '{name}' with arguments from the '{backend}' backend. This could be because the operator "
        "doesn't exist for this backend, or was omitted during the selective/custom build process (if using custom "
        "build)."
    )


def _unsupported_dtype_error(kernel_name: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel_name}\" not implemented for '{_SUB_BYTE_DTYPE_NAMES[dtype]}'")


def _choose_layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of the result of quantizing or dequantizing `tensor`."""
    has_float_parameters = tensor.is_quantized and _get_scheme(tensor) == _PER_CHANNEL_FLOATS
    return torch.contiguous_format if has_float_parameters else suggest_layout(tensor)


def _get_scheme(tensor: torch.Tensor) -> int:
    return aten.qscheme.default.redispatch(_CPU, tensor)  # type: ignore[no-any-return]


def _get_quantizer_parameters(tensor: torch.Tensor) -> dict[str, Any]:
    """Return scales, zero points and axis of the quantizer of `tensor`, as keyword arguments of its constructor."""

    def get_parameter(operator: Any) -> Any:
        return operator.default.redispatch(_CPU, tensor)

    if _get_scheme(tensor) == _PER_TENSOR:
        return {"scale": get_parameter(aten.q_scale), "zero_point": get_parameter(aten.q_zero_point)}
    return {
        "scales": get_parameter(aten.q_per_channel_scales),
        "zero_points": get_parameter(aten.q_per_channel_zero_points),
        "axis": get_parameter(aten.q_per_channel_axis),
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
        is_float = parameters["zero_points"].is_floating_point()
        with launch.inside():
            for name, default_dtype in (("scales", torch.float64), ("zero_points", torch.int64)):
                parameters[name] = parameters[name].to(torch.float32 if is_float else default_dtype).contiguous()
    result = operator.default.redispatch(_CPU, size, dtype=dtype, device=META, memory_format=layout, **parameters)
    launch.record(result, device=device)
    return result


@kernel(aten._empty_affine_quantized, aten._empty_per_channel_affine_quantized, on_host=True)
def empty(launch: KernelContext) -> Any:
    """Allocate a quantized tensor without values."""
    device = launch.kwargs.get("device")
    if device is None or device.type != "meta":
        return launch.func(*launch.args, **launch.kwargs)
    names = ("scale", "zero_point", "scales", "zero_points", "axis")
    quantizer = {k: v for k, v in launch.kwargs.items() if k in names}
    quantizer.update(zip(("scales", "zero_points", "axis"), launch.args[1:], strict=False))
    layout = launch.kwargs.get("memory_format") or torch.contiguous_format
    return _make_quantized(launch, launch.args[0], launch.kwargs["dtype"], layout, **quantizer)


@kernel(aten.quantize_per_tensor, aten.quantize_per_channel, aten.quantize_per_tensor_dynamic, on_host=True)
def quantize(launch: KernelContext) -> Any:
    """Allocate the quantized tensor, then a contiguous copy of the data; dynamic quantization first finds extremes."""
    data, *rest = launch.args
    if not isinstance(data, torch.Tensor) and launch.device != HOST and launch.call.on_gpu:
        raise _missing_kernel_error(launch.func.name(), "CUDA")
    if not isinstance(data, torch.Tensor) or not data.is_meta:
        return launch.func(*launch.args)
    is_dynamic = launch.operator.packet is aten.quantize_per_tensor_dynamic
    if is_dynamic:
        with launch.inside():
            contiguous_data = data.contiguous()
            contiguous_data.min(), contiguous_data.max()
            del contiguous_data
    # A small CPU tensor is quantized with the same arguments, for the quantizer and for errors in the arguments.
    size = [1] if is_dynamic else [0] * data.dim()
    if launch.operator.packet is aten.quantize_per_channel:
        size[rest[2]] = data.shape[rest[2]]
    values = [launch.values.policy.read(value) if isinstance(value, torch.Tensor) else value for value in rest]
    sample = launch.func(torch.ones(size, dtype=data.dtype), *values)
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
    launch.transients(*copy_bytes(data, layout=layout))
    return result


@kernel("aten._make_per_tensor_quantized_tensor", "aten._make_per_channel_quantized_tensor")
def make_from_integers(launch: KernelContext) -> Any:
    """Allocate a quantized tensor with the given integers (native/quantized/cuda/MakePerTensorQuantizedTensor.cu)."""
    data, *rest = launch.args
    names = ("scale", "zero_point") if len(rest) == 2 else ("scales", "zero_points", "axis")
    dtype = next(qdtype for qdtype, storage_dtype in _STORAGE_DTYPES.items() if storage_dtype is data.dtype)
    return _make_quantized(launch, data.shape, dtype, torch.contiguous_format, **dict(zip(names, rest, strict=True)))


@kernel(aten.dequantize)
def dequantize_floats(launch: KernelContext) -> Any:
    """Run `dequantize` on a tensor that is not quantized: convert it to float32."""
    if not isinstance(launch.args[0], torch.Tensor):
        raise _missing_kernel_error(launch.func.name(), "CUDA")
    with launch.inside():
        return launch.args[0].to(torch.float32)


@quantized_kernel(aten.dequantize)
def dequantize(launch: KernelContext) -> Any:
    """Allocate the float32 result, then a contiguous copy of the integers."""
    data = launch.args[0]
    layout = _choose_layout(data)
    result = launch.new(data.shape, torch.float32, layout)
    launch.transients(*copy_bytes(data, layout=layout))
    return result


@quantized_kernel(aten.int_repr)
def int_repr(launch: KernelContext) -> Any:
    """Allocate a tensor of the stored integers (native/quantized/cuda/IntReprQuant.cu)."""
    data = launch.args[0]
    if data.dtype not in _STORAGE_DTYPES:
        raise _unsupported_dtype_error("int_repr", data.dtype)
    return launch.new(data.shape, _STORAGE_DTYPES[data.dtype], suggest_layout(data))


@quantized_kernel(aten.clone, aten.flip, aten.index_select)
def copy_quantizer(launch: KernelContext) -> Any:
    """Allocate the result of clone, flip or index_select: a quantized tensor with the quantizer of the input."""
    data, *rest = launch.args
    size, layout = list(data.shape), launch.kwargs.get("memory_format") or torch.contiguous_format
    if launch.operator.packet is aten.index_select:
        size[rest[0]] = rest[1].numel()
    elif layout is torch.preserve_format or launch.operator.packet is aten.flip:
        layout = suggest_layout(data)
    return _make_quantized(launch, size, data.dtype, layout, **_get_quantizer_parameters(data))


@quantized_kernel(aten._to_copy)
def to_copy(launch: KernelContext) -> Any:
    """Copy to another device, with the scales (TensorConversions.cpp, empty_quantized). Host copies have value 1."""
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
    """Copy into a quantized tensor, which allocates nothing (native/Copy.cpp, copy_impl)."""
    if not launch.args[0].is_quantized:
        raise RuntimeError(_COPY_TO_FLOAT_ERROR)
    return launch.args[0]


@quantized_kernel(aten.masked_fill_, aten._index_put_impl_, aten.relu_, aten.fill_)
def update_in_place(launch: KernelContext) -> Any:
    """Allocate nothing, except in `fill_`: a float32 tensor of the same size (native/Fill.cpp, fill_quantized_)."""
    if launch.operator.packet is aten.fill_:
        launch.transients(4 * launch.args[0].numel())
    return launch.args[0]


@quantized_kernel(aten.gelu, aten._adaptive_avg_pool2d)
def run_in_float32(launch: KernelContext) -> Any:
    """Dequantize, run the operator and quantize again (native/quantized/cuda/Activation.cpp, cudnn/Pooling.cpp)."""
    data, *rest = launch.args
    with launch.inside():
        float_data = aten.dequantize.self(data)
        result = launch.func(float_data, *rest)
        return aten.quantize_per_tensor.default(result, *_get_quantizer_parameters(data).values(), data.dtype)


@quantized_kernel(aten.relu)
def relu(launch: KernelContext) -> Any:
    """Compute the maximum of the integers and the zero point (native/quantized/cuda/Activation.cpp)."""
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
    with launch.scratch(*copy_bytes(data, layout=layout)):
        return _make_quantized(launch, size, torch.qint8, layout, **_get_quantizer_parameters(data))


@quantized_kernel("quantized.add", "quantized.add_relu")
def add(launch: KernelContext) -> Any:
    """Allocate the sum, and three float32 temporaries of an operand's size (native/quantized/cudnn/BinaryOps.cpp)."""
    data, _, scale, zero_point = launch.args
    float32_bytes = 4 * data.numel()
    with launch.scratch(float32_bytes):
        quantizer = {"scale": scale, "zero_point": zero_point}
        result = _make_quantized(launch, data.shape, torch.qint8, torch.contiguous_format, **quantizer)
        launch.transients(float32_bytes, float32_bytes)
    return result


@kernel(aten.fake_quantize_per_tensor_affine_cachemask, aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def fake_quantize_per_tensor(launch: KernelContext) -> Any:
    """Allocate the result, and a mask of the elements in the quantization range."""
    data, *rest = launch.args
    if not any(isinstance(argument, torch.Tensor) for argument in rest):
        launch.func(torch.empty(0), *rest)  # raises the error of a wrong range
    return _make_result_and_mask(launch, data)


def _make_result_and_mask(launch: KernelContext, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with launch.inside():
        return torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)


@kernel(aten.fake_quantize_per_channel_affine_cachemask)
def fake_quantize_per_channel(launch: KernelContext) -> Any:
    """Allocate the result and a mask of elements in range; the host first reads extremes of integer zero points."""
    data, _, zero_point = launch.args[:3]
    if not zero_point.is_floating_point():
        with launch.inside():
            aten.aminmax.default(zero_point)
    return _make_result_and_mask(launch, data)


@kernel(aten._fake_quantize_learnable_per_tensor_affine)
def fake_quantize_learnable_per_tensor(launch: KernelContext) -> Any:
    """Allocate the result for a scale and a zero point that the host reads."""
    data, _, _, quant_min, quant_max = launch.args[:5]
    with launch.inside():
        return aten.fake_quantize_per_tensor_affine_cachemask.default(data, 1.0, quant_min, quant_min, quant_max)[0]


@kernel(aten._fake_quantize_learnable_per_channel_affine)
def fake_quantize_learnable_per_channel(launch: KernelContext) -> Any:
    """Allocate the result of a quantization per channel, with rounded zero points."""
    data, scale, zero_point, axis, quant_min, quant_max = launch.args[:6]
    with launch.inside():
        rounded_zero_point = zero_point.round().clamp_(quant_min, quant_max).to(torch.int32)
        return aten.fake_quantize_per_channel_affine_cachemask.default(
            data, scale, rounded_zero_point, axis, quant_min, quant_max
        )[0]


@kernel(
    aten._fake_quantize_learnable_per_tensor_affine_backward,
    aten._fake_quantize_learnable_per_channel_affine_backward,
)
def fake_quantize_learnable_backward(launch: KernelContext) -> Any:
    """Allocate the gradients; those of scale and zero point have the size of the data until they are summed."""
    grad, data, scale, zero_point = launch.args[:4]
    with launch.inside():
        if launch.operator.packet is aten._fake_quantize_learnable_per_tensor_affine_backward:
            gradients = [torch.empty_like(data) for _ in range(3)]
            return gradients[0], *(t.sum().unsqueeze(0) for t in gradients[1:])
        axis, quant_min, quant_max = launch.args[4:7]
        if data.dtype is torch.bfloat16:
            grad, data, scale, zero_point = (t.float() for t in (grad, data, scale, zero_point))
        rounded_zero_point = zero_point.round().clamp_(quant_min, quant_max)
        extremes = aten.aminmax.default(rounded_zero_point)
        gradients = [torch.empty_like(data) for _ in range(3)]
        summed_dims = [dim for dim in range(data.dim()) if dim != axis]
        result = gradients[0], *(t.sum(summed_dims) for t in gradients[1:])
        del extremes
        return result


@kernel(aten._fused_moving_avg_obs_fq_helper)
def update_range_and_quantize(launch: KernelContext) -> Any:
    """Update the observed range with extremes of the data, and quantize with it; empty buffers are resized first."""
    data, _, fake_quant_on, *observers = launch.args[:7]
    quant_min, quant_max, axis = launch.args[8:11]
    is_per_row = launch.argument(11, "per_row_fake_quant", False)
    with launch.inside():
        contiguous_data = data.contiguous()
        if is_per_row:
            rows = data if data.dim() == 2 else data.transpose(0, axis).flatten(1)
            if not observers[0].numel():
                for observer, initial_value in zip(observers, (math.inf, -math.inf, None, None), strict=True):
                    observer.resize_(data.shape[axis])
                    if initial_value is not None:
                        observer.fill_(initial_value)
            aten.aminmax.default(rows, dim=1)
            del rows
        else:
            aten.aminmax.default(contiguous_data)
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
