"""Products of matrices: cuBLAS's workspaces, the copies that it needs, and biases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memprof.device.cublas import PRODUCTS
from memprof.torch_private import kernels
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import in_backward
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, uses_cublas, uses_cublaslt
from memprof.watch.wrappers import is_wrapped

_linear = kernels.linear

uses_cublas.mark(*(getattr(aten, name) for name in PRODUCTS))


@uses_cublaslt(aten.addmm, aten.addmm_, aten._addmm_activation)
def adds_row(args: Any) -> bool:
    """Return whether what is added is one row for all, a bias (native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt)."""
    added, _, second = args[:3]
    return bool(added.is_contiguous() and added.numel() == added.shape[-1] == second.shape[1] > 1 < second.shape[0])


def _is_taken_by_cublas(tensor: torch.Tensor) -> bool:
    """Return whether a matrix, or each of a batch, has rows or columns that are neighbours (native/cuda/Blas.cpp)."""
    *_, rows, columns = tensor.shape
    *_, row_step, step = tensor.stride()
    if (step == 1 and row_step >= columns) or (row_step == 1 and step >= rows):
        return True
    return (rows == 1 and step == 1) or (columns == 1 and row_step == 1) or (tensor.is_contiguous() and row_step > 0)


def _matrix_copies(first: int, args: Any) -> list[int]:
    """Copies of the two matrices from argument number `first` on, where cuBLAS cannot take them as they are."""
    return [matrix.nbytes for matrix in args[first : first + 2] if not _is_taken_by_cublas(matrix)]


input_copies(aten.mm, aten.bmm)(partial(_matrix_copies, 0))
input_copies(aten.addmm, aten.baddbmm)(partial(_matrix_copies, 1))


@kernel("aten._grouped_mm", on_host=True)
def grouped_mm(launch: KernelContext) -> Any:
    """CUDA takes any floating-point dtype (native/cuda/GroupedBlas.cpp); the meta kernel knows bfloat16 alone.

    That has a kernel of CUTLASS on some GPUs: it takes arguments for each group (three pointers and strides, a shape)
    and four descriptors for every multiprocessor (native/cuda/GroupMM.cu).
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

    def as_bfloat16(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.empty_strided(value.size(), value.stride(), dtype=torch.bfloat16, device=META)
        return torch.bfloat16 if value is dtype else value

    shape = launch.func(*map(as_bfloat16, launch.args), **{k: as_bfloat16(v) for k, v in launch.kwargs.items()})
    result = torch.empty_strided(shape.size(), shape.stride(), dtype=dtype, device=META)
    launch.record(result)
    return result


@kernel(aten._scaled_mm.out)
def scaled_mm_out(launch: KernelContext) -> Any:
    """Multiply into a tensor that is there, as compiled code does; there is no meta kernel for that."""
    out = launch.kwargs["out"]
    launch.values.store.drop(out.untyped_storage()._cdata)
    return out


@kernel(aten.addmm.dtype, aten.addmm.dtype_out)
def addmm_of_two_dtypes(launch: KernelContext) -> Any:
    """Multiply two matrices in half precision, with the result in float32."""
    # torch has a meta kernel of its own for it in 2.13; that of 2.11 takes the dtype for `beta`
    # (torch/_decomp/decompositions.py).
    if not kernels.addmm_dtype.exists():
        launch.call.func = _OnMeta(launch.func)
    return NotImplemented


class _OnMeta:
    """An operator that is run here for meta tensors."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        one, other, out_dtype = args[1:4]
        if not one.is_meta:  # numbers that are known are computed
            return self._operator(*args, **kwargs)
        size, out = (one.size(0), other.size(1)), kwargs.get("out")
        return torch.empty(size, dtype=out_dtype, device=META) if out is None else out.resize_(size)


@composite(_linear)
def linear(
    machine: DeviceState, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the bias in place where it is no single addmm; under a mode out of place (native/Linear.cpp)."""
    if bias is None or is_wrapped(bias):  # in a real run it is added out of place as well
        return _linear(input, weight, bias)
    machine.adds_bias = True
    try:
        return _linear(input, weight, bias)
    finally:
        machine.adds_bias = False


@kernel(aten.add, on_host=True)
def add(launch: KernelContext) -> Any:
    """The engine's own accumulation of two gradients is in place on a run without modes: see engine.py."""
    if in_backward():
        if not launch.accumulates_in_place():
            return NotImplemented
        launch.args[0].add_(launch.args[1])
        return launch.args[0]
    # The other way round, and so no result of a product, is what vmap makes of an addmm.
    one, other = launch.args[:2]
    if launch.machine.adds_bias and one.shape == torch.broadcast_shapes(one.shape, other.shape):
        # Autograd sees an addition (of `linear`, above), so it is given another tensor on the same storage.
        one.add_(other)
        return one.detach()
    return NotImplemented
