"""flash_attn's rotary embeddings, Triton norms and cross-entropy, which nanotron and others use besides attention.

Sources: flash_attn/layers/rotary.py, ops/triton/rotary.py, ops/triton/layer_norm.py, ops/triton/cross_entropy.py and
losses/cross_entropy.py of Dao-AILab/flash-attention@v2.8.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.stubs.registry import stub
from memprof.stubs.tools import (
    check_on_gpu,
    count_multiprocessors,
    kernel,
    mark_written,
    maybe_contiguous,
    record_autotuning,
    refuse_any,
    refuse_if,
    require,
)

_SOURCE = "Dao-AILab/flash-attention@v2.8.3:flash_attn/"
_NORMS = "flash_attn.ops.triton.layer_norm"
_NUM_PARTS = 8  # partial gradients of a norm's weight per multiprocessor (sm_count in _layer_norm_bwd_impl)


@stub("flash_attn.ops.triton.rotary.apply_rotary", source=_SOURCE + "ops/triton/rotary.py")
def apply_rotary(
    x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False
):
    """Return `x` rotated: a new tensor, or `x` itself if `inplace`; dimensions without rotation are copied."""
    check_on_gpu("flash_attn.apply_rotary", x, cos, sin)
    require(cos.shape == sin.shape, "flash_attn.apply_rotary", "cosines and sines of one shape")
    require(2 * cos.shape[-1] <= x.shape[-1] <= 256, "flash_attn.apply_rotary", "rotary_dim <= headdim <= 256")
    max_length = x.shape[1] if cu_seqlens is None else max_seqlen
    require(max_length is not None, "flash_attn.apply_rotary", "max_seqlen with cu_seqlens")
    require(cos.shape[0] >= max_length, "flash_attn.apply_rotary", "seqlen_ro >= seqlen")
    if inplace:
        mark_written(x)
        return x
    output = torch.empty_like(x)
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        output[..., rotary_dim:].copy_(x[..., rotary_dim:])
    return output


@stub(
    "flash_attn.layers.rotary.apply_rotary_emb", "flash_attn.layers.rotary.apply_rotary_emb_func",
    source=_SOURCE + "layers/rotary.py",
)  # fmt: skip
def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Return `x` rotated, [batch, tokens, heads, size] or with cu_seqlens [tokens, heads, size]; saves cos, sin."""

    def forward(x, cos, sin):
        offsets = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
        return apply_rotary(x, cos, sin, inplace=inplace), (cos, sin, cu_seqlens, offsets)

    def backward(saved, gradient):
        return apply_rotary(gradient, saved[0], saved[1], inplace=inplace), None, None

    return kernel(forward, backward, x, cos, sin)


@stub("flash_attn.layers.rotary.apply_rotary_emb_qkv_", source=_SOURCE + "layers/rotary.py")
def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Rotate the queries and keys in `qkv` [batch, tokens, 3, heads, size], and in its gradient, in place."""

    def forward(qkv, *tables):
        check_on_gpu("flash_attn.apply_rotary_emb_qkv_", qkv)
        mark_written(qkv)
        return qkv, (*tables, seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None)

    return kernel(forward, lambda saved, gradient: (gradient, *(None,) * 4), qkv, cos, sin, cos_k, sin_k)


@stub("flash_attn.layers.rotary.apply_rotary_emb_kv_", source=_SOURCE + "layers/rotary.py")
def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotate the keys in `kv` [batch, tokens, 2, heads, size], and in its gradient, in place."""
    return apply_rotary_emb_qkv_(kv, cos, sin, None, None, interleaved, seqlen_offsets)


@stub("flash_attn.layers.rotary.RotaryEmbedding", source=_SOURCE + "layers/rotary.py")
class RotaryEmbedding(nn.Module):
    """A rotary embedding, which caches cosines and sines for the longest sequence so far, in the input's dtype."""

    inv_freq: torch.Tensor
    scale: Any

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.interleaved, self.scale_base = interleaved, scale_base
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._tables: dict[str, torch.Tensor | None] = {}

    def _compute_inv_freq(self, device=None):
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / (self.base ** (exponents / self.dim))

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        cached = self._tables.get("cos")
        if (
            cached is not None and seqlen <= self._seq_len_cached and cached.device == device
            and cached.dtype == dtype and not (self.training and cached.is_inference())
        ):  # fmt: skip
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        is_float32 = self.inv_freq.dtype == torch.float32
        freqs = torch.outer(positions, self.inv_freq if is_float32 else self._compute_inv_freq(device=device))
        functions = (("cos", torch.cos), ("sin", torch.sin))
        if self.scale is None:
            for name, function in functions:
                self._tables[name] = function(freqs).to(dtype)
            return
        power = torch.arange(seqlen, dtype=self.scale.dtype, device=self.scale.device) - seqlen // 2
        power = power / self.scale_base
        scale = self.scale.to(device=power.device) ** power[:, None]
        for name, function in functions:
            self._tables[name] = (function(freqs) * scale).to(dtype)
        for name, function in functions:
            self._tables[f"{name}_k"] = (function(freqs) / scale).to(dtype)

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        tokens = qkv.shape[1]
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(tokens + seqlen_offset, device=qkv.device, dtype=qkv.dtype)
        cos, sin, cos_k, sin_k = (self._tables.get(name) for name in ("cos", "sin", "cos_k", "sin_k"))
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        rotated = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        key_tables = (cos, sin) if cos_k is None else (cos_k, sin_k)
        return rotated, apply_rotary_emb_kv_(kv, *key_tables, self.interleaved, seqlen_offset)


def _flatten_rows(tensor: torch.Tensor) -> torch.Tensor:
    return maybe_contiguous(tensor.reshape(-1, tensor.shape[-1]))  # type: ignore[no-any-return]


def norm(
    name: str, num_parts: int, x: torch.Tensor, weight, bias, residual, dropout_p: float, prenorm: bool,
    residual_in_fp32: bool, is_rms: bool, out_dtype=None,
):  # fmt: skip
    """Run LayerNormFn: saves `x`, or its sum with the residual in the residual's dtype, and row statistics.

    `name` is the called function, "package.function". The backward allocates `num_parts` partial gradients of weight
    and bias per multiprocessor.
    """
    shape, dtype, has_residual = x.shape, x.dtype, residual is not None
    sum_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else None
    key = (shape[-1], has_residual, sum_dtype, is_rms, bias is not None, dtype)

    def forward(x, weight, bias, residual):
        check_on_gpu(name, x)
        for weight_or_bias in (weight, bias):
            require(weight_or_bias is None or weight_or_bias.shape == shape[-1:], name, f"weights of {shape[-1]}")
        rows = _flatten_rows(x)
        output = torch.empty_like(rows, dtype=out_dtype)
        x_sum = rows
        if has_residual or sum_dtype not in (None, dtype) or dropout_p > 0:
            x_sum = torch.empty_like(rows, dtype=sum_dtype or dtype)
        num_rows = rows.shape[0]
        mean = None if is_rms else rows.new_empty(num_rows, dtype=torch.float32)
        rstd = rows.new_empty(num_rows, dtype=torch.float32)
        seeds = torch.randint(2**32, (num_rows,), device=rows.device, dtype=torch.int64) if dropout_p > 0 else None
        record_autotuning(f"{name} forward", key)
        saved = (x_sum, weight.contiguous(), bias, seeds, mean, rstd)
        result = output.reshape(shape)
        return ((result, x_sum.reshape(shape)) if prenorm else result), saved

    def backward(saved, gradient, *sum_gradient):
        x_sum, *parameters = saved[:3]
        gradient = _flatten_rows(gradient)
        d_x = torch.empty(x_sum.shape, dtype=dtype, device=x_sum.device)
        is_separate = has_residual and (dtype != x_sum.dtype or dropout_p > 0)
        d_residual = torch.empty_like(x_sum) if is_separate else d_x
        parts_shape = (count_multiprocessors() * num_parts, shape[-1])
        parts = [None if t is None else x_sum.new_empty(parts_shape, dtype=torch.float32) for t in parameters]
        record_autotuning(f"{name} backward", key)
        d_weight, d_bias = (
            None if partial is None else partial.sum(0).to(t.dtype)
            for partial, t in zip(parts, parameters, strict=True)
        )
        return d_x.reshape(shape), d_weight, d_bias, d_residual.reshape(shape) if has_residual else None

    return kernel(forward, backward, x, weight, bias, residual)


@stub(f"{_NORMS}.layer_norm_fn", source=_SOURCE + "ops/triton/layer_norm.py")
def layer_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, return_dropout_mask=False,
    out_dtype=None, out=None, residual_out=None,
):  # fmt: skip
    """Return the layer or RMS norm of `x` + `residual`; saves row statistics; partial gradients in the backward."""
    refuse_any(
        f"{_NORMS}.layer_norm_fn", x1=x1, weight1=weight1, bias1=bias1, rowscale=rowscale, out=out,
        residual_out=residual_out, return_dropout_mask=return_dropout_mask or None,
    )  # fmt: skip
    return norm(
        "flash_attn.layer_norm_fn", _NUM_PARTS, x, weight, bias, residual, dropout_p, prenorm, residual_in_fp32,
        is_rms_norm, out_dtype,
    )  # fmt: skip


@stub(f"{_NORMS}.rms_norm_fn", source=_SOURCE + "ops/triton/layer_norm.py")
def rms_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, residual_in_fp32=False, zero_centered_weight=False, return_dropout_mask=False, out_dtype=None,
    out=None, residual_out=None,
):  # fmt: skip
    """Return the RMS norm of `x` + `residual`; allocates as layer_norm_fn does."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


@stub(f"{_NORMS}.RMSNorm", source=_SOURCE + "ops/triton/layer_norm.py")
class RMSNorm(nn.Module):
    """An RMS norm that calls rms_norm_fn."""

    norm = staticmethod(rms_norm_fn)

    def __init__(self, hidden_size, eps=1e-5, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None):
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        dropout = self.drop.p if self.drop is not None and self.training else 0.0
        return self.norm(
            x, self.weight, self.bias, residual=residual, dropout_p=dropout, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )  # fmt: skip


@stub("flash_attn.ops.triton.cross_entropy.cross_entropy_loss", source=_SOURCE + "ops/triton/cross_entropy.py")
def cross_entropy_loss(
    logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100,
    inplace_backward=False, process_group=None,
):  # fmt: skip
    """Return losses and z-losses in float32; saves logits, which the gradient may overwrite, and log-sum-exp."""
    is_distributed = process_group is not None and torch.distributed.get_world_size(process_group) > 1
    refuse_if("flash_attn.ops.triton.cross_entropy.cross_entropy_loss", {"a process group of several": is_distributed})

    def forward(logits, labels):
        check_on_gpu("flash_attn.cross_entropy_loss", logits, labels)
        require(labels.shape == logits.shape[:1], "flash_attn.cross_entropy_loss", "a label for each row of logits")
        logits = maybe_contiguous(logits)
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        has_lse = precomputed_lse is not None and logit_scale == 1.0 and label_smoothing == 0.0
        lse = precomputed_lse.contiguous() if has_lse else torch.empty_like(losses)
        return (losses, torch.empty_like(losses)), (logits, lse, labels)

    def backward(saved, *gradients):
        if inplace_backward:
            mark_written(saved[0])
        return (saved[0] if inplace_backward else torch.empty_like(saved[0])), None

    losses, z_losses = kernel(forward, backward, logits, labels)
    return losses, z_losses.detach()


@stub("flash_attn.losses.cross_entropy.CrossEntropyLoss", source=_SOURCE + "losses/cross_entropy.py")
class CrossEntropyLoss(nn.Module):
    """The cross-entropy loss: mean over labels that are not ignored, sum, or the loss of each label."""

    def __init__(
        self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
        inplace_backward=False, process_group=None, return_z_loss=False,
    ):  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError("Only support reduction = 'mean' or 'none' or 'sum'")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group, self.return_z_loss = inplace_backward, process_group, return_z_loss

    def forward(self, input, target, precomputed_lse=None):
        losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        results = tuple(self._reduce(loss, target) for loss in losses[: 1 + bool(self.return_z_loss)])
        return results if self.return_z_loss else results[0]

    def _reduce(self, loss, target):
        if self.reduction == "mean":
            return loss.sum() / (target != self.ignore_index).sum()
        return loss.sum() if self.reduction == "sum" else loss
