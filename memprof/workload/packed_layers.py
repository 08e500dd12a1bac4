"""Linear layers of GPTQ and AWQ checkpoints: the tensors that each stores, and what its kernel allocates.

The libraries' own layers cannot be imported without a GPU to compile for. Layouts are those of AutoGPTQ 0.7.1 and
AutoAWQ 0.2.9, which all later files have; kernels are GPTQModel's at 7.3.4, with which transformers 5 runs both
(gptqmodel/nn_modules/qlinear/{marlin,marlin_awq,gemm_awq,tritonv2,torch}.py, gptqmodel_ext/marlin/gptq_marlin.cu,
gptqmodel_ext/awq/quantization/gemm_cuda_gen.cu). Nothing is computed: results have their shape and no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_WORD_BITS = 32
_MAX_ROWS = 64
# Of the tile that Marlin reduces in float32 (marlin.cuh, max_thread_n); each multiprocessor has one.
_MAX_COLUMNS = 256
_MIN_LOCKS = 128
_SPLIT_K = 8
_LONG_INPUT = 1024  # tokens above which AWQ's GEMM unpacks the weight (gemm_awq.py, FULL_DEQUANT_MATMUL_THRESHOLD)


def _make_stored_parameter(*shape: int, dtype: torch.dtype = torch.int32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed into integers of 32 bits, with a scale and a zero per group of rows.

    Kernels want scales in their input's dtype, and cast a file's once, at their first call; here they are made so.
    """

    scale_dtype: torch.dtype | None = None  # None: the model's

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__()
        rows, columns = linear.in_features, linear.out_features
        self.in_features, self.out_features = rows, columns
        self.bits = bits
        self.groups = -(-rows // (rows if group_size == -1 else group_size))
        self.num_weights = rows * columns
        self._create_packed_weight(rows, columns)
        self.qzeros = _make_stored_parameter(self.groups, columns * bits // _WORD_BITS)
        dtype = self.scale_dtype or linear.weight.dtype
        self.scales = _make_stored_parameter(self.groups, columns, dtype=dtype)
        self.bias = None if linear.bias is None else _make_stored_parameter(columns, dtype=dtype)

    def _create_packed_weight(self, rows: int, columns: int) -> None:
        raise NotImplementedError

    def loaded(self) -> None:
        """Do what its kernel does to the tensors once they are on the GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, in the input's dtype."""
        return self._multiply(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _unpack_weight(self, like: torch.Tensor) -> torch.Tensor:
        """Return the whole weight, as one kernel unpacks it."""
        return like.new_empty((self.in_features, self.out_features))

    def extra_repr(self) -> str:
        """Return its shape."""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, groups={self.groups}"


class Gptq(PackedLinear):
    """Linear layer with GPTQ's tensors: packed along the rows, with the group of each row."""

    def _create_packed_weight(self, rows: int, columns: int) -> None:
        self.qweight = _make_stored_parameter(rows * self.bits // _WORD_BITS, columns)
        self.g_idx = _make_stored_parameter(rows)


class Awq(PackedLinear):
    """Linear layer with AWQ's tensors: packed along the columns."""

    def _create_packed_weight(self, rows: int, columns: int) -> None:
        self.qweight = _make_stored_parameter(rows, columns * self.bits // _WORD_BITS)


class _Marlin(PackedLinear):
    """Linear layer repacked for Marlin, which unpacks in registers and sums tiles in float32."""

    desc_act = False

    def loaded(self) -> None:
        """Repack into new tensors, one after the other; there are locks for each multiprocessor."""
        device = self.scales.device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        locks = torch.zeros(max(self.processors, _MIN_LOCKS), dtype=torch.int32, device=device)
        self.workspace = nn.Parameter(locks, requires_grad=False)
        for name in self._repacked:
            setattr(self, name, nn.Parameter(torch.empty_like(getattr(self, name)), requires_grad=False))

    _repacked: tuple[str, ...] = ("qweight", "scales")

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        result = x.new_empty((tokens, self.out_features))
        rows = min(-(-tokens // 16) * 16, _MAX_ROWS)
        tiles = x.new_empty(self.processors * rows * _MAX_COLUMNS, dtype=torch.float32)
        permuted = torch.empty_like(x) if self.desc_act else None
        del tiles, permuted
        return result


class GptqMarlin(_Marlin, Gptq):
    """marlin.py: symmetric, so that the zeros go; so do the rows' groups, unless they are not in order."""

    def loaded(self) -> None:
        """Repack; with `desc_act` the groups are sorted, and their order is kept beside them."""
        if self.desc_act:
            order = nn.Parameter(torch.empty_like(self.g_idx), requires_grad=False)
            self.g_idx = nn.Parameter(torch.empty_like(self.g_idx), requires_grad=False)
            self.g_idx_sort_indices = order
        else:
            self.register_parameter("g_idx", None)
        self.register_parameter("qzeros", None)
        super().loaded()


class AwqMarlin(_Marlin, Awq):
    """marlin_awq.py."""

    _repacked = ("qweight", "scales", "qzeros")


class GptqUnpacking(Gptq):
    """tritonv2.py: the weight is unpacked whole for each product.

    In training it is TorchLinear that runs: its compiled dequantize_weight is taken for one kernel, and autograd keeps
    what it makes, in half precision, until the layer's backward.
    """

    scale_dtype = torch.float16

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            result = torch.matmul(x, self._unpack_weight(self.scales).to(x.dtype))
        else:
            result = _Unpacking.apply(x, self)
        return result if self.bias is None else result.add_(self.bias)


class _Unpacking(torch.autograd.Function):
    """triton_utils/dequant.py, QuantLinearFunction: unpacked again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.matmul(x, layer._unpack_weight(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        return grad @ ctx.layer._unpack_weight(grad).t(), None


class AwqGemm(Awq):
    """gemm_awq.py: short inputs in 8 slices of the rows, summed up; long ones by the unpacked weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; outside training nothing is kept of it."""
        x = x.contiguous()
        if self.training:
            return _Gemm.apply(x, self)  # type: ignore[no-any-return]
        with torch.no_grad():
            return _Gemm.apply(x, self)  # type: ignore[no-any-return]


class _Gemm(torch.autograd.Function):
    """gemm_awq.py, AwqGemmFn; its backward copies the unpacked weight for each sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: AwqGemm) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        tokens = x.shape[:-1].numel()
        if tokens > _LONG_INPUT:
            result = torch.matmul(x, layer._unpack_weight(x))
        else:
            slices = x.new_empty((_SPLIT_K, tokens, layer.out_features), dtype=torch.float32)
            result = x.new_empty((*x.shape[:-1], layer.out_features))
            del slices
        return result if layer.bias is None else result + layer.bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        weight = ctx.layer._unpack_weight(grad)
        return grad.bmm(weight.transpose(0, 1).unsqueeze(0).repeat(grad.shape[0], 1, 1)), None


KERNELS: dict[tuple[str, str], type[PackedLinear]] = {
    ("gptq", "marlin"): GptqMarlin,
    ("gptq", "triton"): GptqUnpacking,
    ("awq", "marlin"): AwqMarlin,
    ("awq", "gemm"): AwqGemm,
}
