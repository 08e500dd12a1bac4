"""xformers.ops: SwiGLU, and unbind, which splits the packed tensor of two of its weights.

Sources: xformers/ops/swiglu_op.py, ops/unbind.py and csrc/swiglu of facebookresearch/xformers@v0.0.32.post2.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import HALF, autocast_dtype, check_on_gpu, refuse_if

_SWIGLU = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/swiglu_op.py, xformers/csrc/swiglu"


class _Unbind(torch.autograd.Function):
    """torch.unbind with a backward that stacks the gradients, without a copy if they are slices of one tensor."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int):
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        stacked = _as_one_tensor(gradients, ctx.dim)
        return torch.stack(gradients, dim=ctx.dim) if stacked is None else stacked, None


def _as_one_tensor(tensors, dim: int) -> torch.Tensor | None:
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    is_one_tensor = all(
        t.shape == first.shape
        and t.stride() == first.stride()
        and t.storage_offset() == first.storage_offset() + i * step
        and t.untyped_storage()._cdata == first.untyped_storage()._cdata
        for i, t in enumerate(tensors)
    )
    if len(tensors) < 2 or not is_one_tensor:
        return None
    shape, strides = list(first.shape), list(first.stride())
    shape.insert(dim, len(tensors))
    strides.insert(dim, step)
    return first.as_strided(shape, strides)


@stub("xformers.ops.unbind", source="facebookresearch/xformers@v0.0.32.post2:xformers/ops/unbind.py")
def unbind(x, dim):
    """Return torch.unbind's views; the backward does not copy gradients that are slices of one tensor."""
    return _Unbind.apply(x, dim)


class _FusedSwiGLU(torch.autograd.Function):
    """xformers' fused SwiGLU: `_SwiGLUFusedFunc`, or for packed weights `SwiGLUPackedWeights` (swiglu_packedw.cpp).

    One kernel computes both gates and the third product's input, which the backward recomputes. Under autocast each
    weight is cast at its use; in the forward autocast caches the copies.
    """

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, w3, b3):
        linear = torch.nn.functional.linear
        ctx.dtype = autocast_dtype(w1.dtype)
        if w1.dtype == ctx.dtype:
            x1, x2, hidden = (x.new_empty(x.shape[0], w1.shape[0], dtype=ctx.dtype) for _ in range(3))
        else:
            x_cast = x.to(ctx.dtype)
            x1, x2 = linear(x_cast, w1, b1), linear(x_cast, w2, b2)
            hidden = torch.empty_like(x1)
            del x_cast
        out = linear(hidden, w3, b3)
        ctx.save_for_backward(x, w1, w2, w3, x1, x2)
        ctx.bias = b1 is not None, b3 is not None
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, w1, w2, w3, x1, x2 = ctx.saved_tensors
        dtype = ctx.dtype
        w3_cast = w3.to(dtype)
        d_hidden = gradient @ w3_cast
        d_gates, hidden = x2.new_empty(x2.shape[0], 2, x2.shape[1]), torch.empty_like(x2)
        del x1, x2, d_hidden
        d_w3, d_b3 = _weight_gradient(gradient, hidden, ctx.bias[1])
        del hidden, gradient
        w12 = _as_one_tensor((w1, w2), 0)
        if w12 is not None:
            rows = d_gates.flatten(1)
            d_x = rows @ w12.flatten(0, 1)
            d_w, d_b = _weight_gradient(rows, x, ctx.bias[0])
            d_w1, d_w2 = d_w.view(2, *w1.shape).unbind(0)
            d_b1, d_b2 = (None, None) if d_b is None else d_b.view(2, -1).unbind(0)
        else:
            d_1, d_2 = d_gates.unbind(1)
            w2_cast = w2.to(dtype)
            d_x = d_2 @ w2_cast
            torch.addmm(d_x, d_1, w1.to(dtype), out=d_x)
            d_w2, d_b2 = _weight_gradient(d_2, x.to(dtype), ctx.bias[0])
            d_w1, d_b1 = _weight_gradient(d_1, x.to(dtype), ctx.bias[0])
        return d_x, d_w1, d_b1, d_w2, d_b2, d_w3, d_b3


class _CastPackedWeights(torch.autograd.Function):
    """A cast of two packed weights by one operator, as also of their gradients in the backward."""

    @staticmethod
    def forward(ctx, w1, w2, dtype):
        ctx.dtype = w1.dtype
        return torch.empty((2, *w1.shape), dtype=dtype, device=w1.device).unbind(0)

    @staticmethod
    def backward(ctx, *gradients):
        stacked = _as_one_tensor(gradients, 0)
        assert stacked is not None  # guaranteed by _FusedSwiGLU
        return *stacked.to(ctx.dtype).unbind(0), None


def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of weight and bias, by one kernel (gemm_fused_operand_sum.cu); None without `bias`."""
    if not bias:
        return gradient.transpose(-2, -1) @ x, None
    sums = gradient.new_empty(gradient.shape[1])
    return gradient.new_empty(gradient.shape[1], x.shape[1]), sums


@stub("xformers.ops.swiglu_op.swiglu", "xformers.ops.swiglu", source=_SWIGLU)
def swiglu(x, w1, b1, w2, b2, w3, b3, *, op=None):
    """SwiGLU: fused in half precision on compute capability 8.0 or higher, else by three linear layers."""
    name = "xformers.ops.swiglu"
    check_on_gpu(name, x, w1, w2, w3)
    refuse_if(name, {"op": op is not None})
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    dtype = autocast_dtype(w1.dtype)
    if torch.cuda.get_device_capability() >= (8, 0) and (x.dtype in HALF or dtype in HALF):
        if dtype != w1.dtype and _as_one_tensor((w1, w2), 0) is not None:
            w1, w2 = _CastPackedWeights.apply(w1, w2, dtype)
            x, w3 = x.to(dtype), w3.to(dtype)
            b1, b2, b3 = (t if t is None else t.to(dtype) for t in (b1, b2, b3))
        return _FusedSwiGLU.apply(x, w1, b1, w2, b2, w3, b3).reshape(*shape, -1)  # type: ignore[no-any-return]
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    return linear(silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3).reshape(*shape, -1)


@stub("xformers.ops.swiglu_op.SwiGLU", "xformers.ops.SwiGLU", source=_SWIGLU)
class SwiGLU(torch.nn.Module):
    """A SwiGLU layer: three linear layers, of which the first two share a packed weight if `_pack_weights`."""

    def __init__(self, in_features, hidden_features, out_features=None, bias=True, *, _pack_weights=True):
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features or in_features
        self.out_features = out_features or in_features
        self.w12 = torch.nn.Linear(in_features, 2 * self.hidden_features, bias=bias) if _pack_weights else None
        if not _pack_weights:
            self.w1 = torch.nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = torch.nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = torch.nn.Linear(self.hidden_features, self.out_features, bias=bias)
        self.op: Any = None

    def forward(self, x):
        """Run the layer: [..., in_features] -> [..., out_features]."""
        if self.w12 is None:
            w1, b1, w2, b2 = self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias
        else:
            w1, w2 = unbind(self.w12.weight.unflatten(0, (2, -1)), 0)
            b1, b2 = (None, None) if self.w12.bias is None else unbind(self.w12.bias.unflatten(0, (2, -1)), 0)  # type: ignore[assignment]
        return swiglu(x, w1, b1, w2, b2, self.w3.weight, self.w3.bias, op=self.op)
