"""Matrix products: cuBLAS workspaces, copies of inputs with strides that cuBLAS does not support, and biases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memprof.allocator.cublas import PRODUCTS
from memprof.torch_private import kernels
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import is_in_backward
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, uses_cublas, uses_cublaslt
from memprof.watch.wrappers import is_wrapped

_linear = kernels.linear

uses_cublas.mark(*(getattr(aten, name) for name in PRODUCTS))


@uses_cublaslt(aten.addmm, aten.addmm_, aten._addmm_activation)
def adds_bias_row(args: Any) -> bool:
    """Return whether addmm adds a bias (one row for all), as cuBLASLt requires (isInputCompliesAddmmCudaLt)."""
    bias, _, second = args[:3]
    return bool(bias.is_contiguous() and bias.numel() == bias.shape[-1] == second.shape[1] > 1 < second.shape[0])


def _is_valid_for_cublas(tensor: torch.Tensor) -> bool:
    """Return whether cuBLAS supports the strides: contiguous rows or columns in each matrix (native/cuda/Blas.cpp)."""
    *_, rows, columns = tensor.shape
    *_, row_stride, col_stride = tensor.stride()
    if (col_stride == 1 and row_stride >= columns) or (row_stride == 1 and col_stride >= rows):
        return True
    is_vector = (rows == 1 and col_stride == 1) or (columns == 1 and row_stride == 1)
    return is_vector or (tensor.is_contiguous() and row_stride > 0)


def _compute_matrix_copies(first_position: int, args: Any) -> list[int]:
    """Return the bytes of copies that cuBLAS needs of two matrices, arguments `first_position` and the next."""
    return [matrix.nbytes for matrix in args[first_position : first_position + 2] if not _is_valid_for_cublas(matrix)]


input_copies(aten.mm, aten.bmm)(partial(_compute_matrix_copies, 0))
input_copies(aten.addmm, aten.baddbmm)(partial(_compute_matrix_copies, 1))


@kernel("aten._grouped_mm", on_host=True)
def grouped_mm(launch: KernelContext) -> Any:
    """Multiply in any floating-point dtype (native/cuda/GroupedBlas.cpp); the meta kernel supports only bfloat16.

    For bfloat16, some GPUs run a CUTLASS kernel with arguments for each group (three pointers and strides, a shape) and
    four descriptors for each multiprocessor (native/cuda/GroupMM.cu).
    """
    left, right = launch.args[:2]
    dtype = left.dtype
    if not left.is_meta:
        return NotImplemented
    if dtype is torch.bfloat16:
        result = launch.run()
        if launch.gpu.compute_capability in ((9, 0), (10, 0)):
            stacked_matrices = next((t for t in (right, left) if t.dim() == 3), None)
            num_groups = len(launch.argument(2, "offs") if stacked_matrices is None else stacked_matrices)
            launch.transients((num_groups + num_groups % 2) * 24 + num_groups * (12 + 24), launch.gpu.num_sms * 4 * 128)
        return result

    def to_bfloat16(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.empty_strided(value.size(), value.stride(), dtype=torch.bfloat16, device=META)
        return torch.bfloat16 if value is dtype else value

    bf16_result = launch.func(*map(to_bfloat16, launch.args), **{k: to_bfloat16(v) for k, v in launch.kwargs.items()})
    result = torch.empty_strided(bf16_result.size(), bf16_result.stride(), dtype=dtype, device=META)
    launch.record(result)
    return result


@kernel(aten._scaled_mm.out)
def scaled_mm_out(launch: KernelContext) -> Any:
    """Multiply into the tensor `out`, as compiled code does; torch has no meta kernel for this overload."""
    out = launch.kwargs["out"]
    launch.values.store.drop(out.untyped_storage()._cdata)
    return out


@kernel(aten.addmm.dtype, aten.addmm.dtype_out)
def addmm_with_out_dtype(launch: KernelContext) -> Any:
    """Run addmm of half-precision matrices with a float32 result."""
    # torch 2.13 has a correct meta kernel; the meta kernel of 2.11 reads the dtype as `beta`
    # (torch/_decomp/decompositions.py).
    if not kernels.addmm_dtype.exists():
        launch.call.func = _AddmmWithOutDtype(launch.func)
    return NotImplemented


class _AddmmWithOutDtype:
    """Overload of addmm with an output dtype, and with a meta kernel of its own."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        left, right, out_dtype = args[1:4]
        if not left.is_meta:  # CPU tensors of known values
            return self._operator(*args, **kwargs)
        shape, out = (left.size(0), right.size(1)), kwargs.get("out")
        return torch.empty(shape, dtype=out_dtype, device=META) if out is None else out.resize_(shape)


@composite(_linear)
def linear(
    device_state: DeviceState, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run `linear`; a bias that is not fused into addmm is added in place, as without a mode (native/Linear.cpp)."""
    if bias is None or is_wrapped(bias):  # added out of place in a real run too
        return _linear(input, weight, bias)
    device_state.adds_bias = True
    try:
        return _linear(input, weight, bias)
    finally:
        device_state.adds_bias = False


@kernel(aten.add, on_host=True)
def add(launch: KernelContext) -> Any:
    """Run `add` in place where real runs do, for gradient accumulation (engine.py) and the bias of `linear`."""
    if is_in_backward():
        if not launch.accumulates_in_place():
            return NotImplemented
        launch.args[0].add_(launch.args[1])
        return launch.args[0]
    # Under vmap, addmm adds the product to the bias: the first argument is no result of a product then.
    left, right = launch.args[:2]
    if launch.device_state.adds_bias and left.shape == torch.broadcast_shapes(left.shape, right.shape):
        # Autograd sees the out-of-place addition of `linear` (above), which must return another tensor object.
        left.add_(right)
        return left.detach()
    return NotImplemented
