"""Products of matrices: cuBLAS's workspaces, copies of inputs for cuBLAS, and biases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memprof.device.cublas import PRODUCTS
from memprof.torch_private import kernels
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import is_in_backward
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, uses_cublas, uses_cublaslt
from memprof.watch.wrappers import is_wrapped

_linear = kernels.linear

uses_cublas.mark(*(getattr(aten, name) for name in PRODUCTS))


@uses_cublaslt(aten.addmm, aten.addmm_, aten._addmm_activation)
def adds_row(args: Any) -> bool:
    """Return whether the added tensor is one row for all, a bias (native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt)."""
    bias, _, second = args[:3]
    return bool(bias.is_contiguous() and bias.numel() == bias.shape[-1] == second.shape[1] > 1 < second.shape[0])


def _is_valid_for_cublas(tensor: torch.Tensor) -> bool:
    """Return whether each matrix has contiguous rows or columns (native/cuda/Blas.cpp)."""
    *_, rows, columns = tensor.shape
    *_, row_step, step = tensor.stride()
    if (step == 1 and row_step >= columns) or (row_step == 1 and step >= rows):
        return True
    return (rows == 1 and step == 1) or (columns == 1 and row_step == 1) or (tensor.is_contiguous() and row_step > 0)


def _matrix_copies(first: int, args: Any) -> list[int]:
    """Return the bytes of copies of the matrices at arguments `first` and `first + 1` with unsupported strides."""
    return [matrix.nbytes for matrix in args[first : first + 2] if not _is_valid_for_cublas(matrix)]


input_copies(aten.mm, aten.bmm)(partial(_matrix_copies, 0))
input_copies(aten.addmm, aten.baddbmm)(partial(_matrix_copies, 1))


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
            batched = next((each for each in (right, left) if each.dim() == 3), None)
            groups = len(launch.argument(2, "offs") if batched is None else batched)
            launch.transients((groups + groups % 2) * 24 + groups * (12 + 24), launch.gpu.num_sms * 4 * 128)
        return result

    def to_bfloat16(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.empty_strided(value.size(), value.stride(), dtype=torch.bfloat16, device=META)
        return torch.bfloat16 if value is dtype else value

    shape = launch.func(*map(to_bfloat16, launch.args), **{k: to_bfloat16(v) for k, v in launch.kwargs.items()})
    result = torch.empty_strided(shape.size(), shape.stride(), dtype=dtype, device=META)
    launch.record(result)
    return result


@kernel(aten._scaled_mm.out)
def scaled_mm_out(launch: KernelContext) -> Any:
    """Multiply into the tensor `out`, as compiled code does; torch has no meta kernel for this overload."""
    out = launch.kwargs["out"]
    launch.values.store.drop(out.untyped_storage()._cdata)
    return out


@kernel(aten.addmm.dtype, aten.addmm.dtype_out)
def addmm_of_two_dtypes(launch: KernelContext) -> Any:
    """Multiply two matrices in half precision, with the result in float32."""
    # torch 2.13 has a correct meta kernel; the meta kernel of 2.11 reads the dtype as `beta`
    # (torch/_decomp/decompositions.py).
    if not kernels.addmm_dtype.exists():
        launch.call.func = _AddmmWithDtype(launch.func)
    return NotImplemented


class _AddmmWithDtype:
    """Overload of addmm with an output dtype, with a meta kernel."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        left, right, out_dtype = args[1:4]
        if not left.is_meta:  # CPU tensors of known values
            return self._operator(*args, **kwargs)
        size, out = (left.size(0), right.size(1)), kwargs.get("out")
        return torch.empty(size, dtype=out_dtype, device=META) if out is None else out.resize_(size)


@composite(_linear)
def linear(
    device_state: DeviceState, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run `linear` so that a bias outside of an addmm is added in place, as without a mode (native/Linear.cpp)."""
    if bias is None or is_wrapped(bias):  # added out of place in a real run too
        return _linear(input, weight, bias)
    device_state.adds_bias = True
    try:
        return _linear(input, weight, bias)
    finally:
        device_state.adds_bias = False


@kernel(aten.add, on_host=True)
def add(launch: KernelContext) -> Any:
    """Add in place where a run without modes does: the engine's accumulation of gradients (engine.py), and a bias."""
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
