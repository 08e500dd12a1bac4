"""transformer_engine's attention on one GPU: DotProductAttention by cuDNN, MultiheadAttention around it.

Sources: pytorch/attention/ (dot_product_attention/utils.py, get_qkv_layout and get_attention_backend; backends.py,
FusedAttnFunc; multi_head_attention.py; rope.py), pytorch/csrc/extensions/attention.cpp, pytorch/utils.py
(SplitAlongDim). cuDNN's backward allocates as in torch's own attention by cuDNN: the gradient of the queries in
float32, and a sum for each row.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import HALF, check_on_gpu, keep_for_run, kernel, refuse_if
from memprof.stubs.transformer_engine.linear import LayerNormLinear, Linear
from memprof.stubs.transformer_engine.precision import register

_NAME = "transformer_engine.pytorch.DotProductAttention"
_MASKS = ("causal", "causal_bottom_right", "no_mask")
_MAX_HEAD = 256


def _find_interleaving_dim(tensors: tuple[torch.Tensor, ...]) -> int | None:
    """Return the dimension along which the tensors are slices of one tensor (-3 or -2); None: they are not."""
    first = tensors[0]
    if not all(_has_same_layout(tensor, first) for tensor in tensors):
        return None
    for dim, step in ((-3, first.shape[-1] * first.shape[-2]), (-2, first.shape[-1])):
        if all(tensor.storage_offset() == index * step for index, tensor in enumerate(tensors)):
            return dim
    return None


def _has_same_layout(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share a storage and have the same shape and strides."""
    has_same_storage = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return has_same_storage and tensor.shape == other.shape and tensor.stride() == other.stride()


def _get_qkv_layout(tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], int, int | None]:
    """Return the tensors, contiguous if needed, how many are slices of one tensor, and its dimension for them."""
    _, key, value = tensors
    if (dim := _find_interleaving_dim(tensors)) is not None:
        return tensors, 3, dim
    if (dim := _find_interleaving_dim((key, value))) is not None:
        return tensors, 2, dim
    are_separate = all(tensor.storage_offset() == 0 for tensor in tensors)
    if key.stride() == value.stride() and key.shape[:-1] == value.shape[:-1] and are_separate:
        return tensors, 1, None
    return tuple(tensor.contiguous() for tensor in tensors), 1, None


def _allocate_gradients(
    saved: tuple[torch.Tensor, ...], num_interleaved: int, dim: int | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `saved`; those of interleaved tensors are slices of one tensor (fused_attn_bwd)."""
    if dim is None:
        return tuple(tensor.new_empty(tensor.shape) for tensor in saved)
    shape = list(saved[-1].shape)
    shape.insert(len(shape) + dim + 1, num_interleaved)
    gradients = saved[-1].new_empty(shape).unbind(dim)
    return gradients if num_interleaved == 3 else (saved[0].new_empty(saved[0].shape), *gradients)


@register("attention.dot_product_attention.dot_product_attention", "attention")
class DotProductAttention(nn.Module):
    """cuDNN's attention: saves queries, keys, values, output, a float32 value per row, and the RNG state."""

    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,
        get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        super().__init__()
        refuse_if(_NAME, {
            f"tp_size={tp_size}": tp_size != 1, "cp_group": cp_group is not None,
            f"softmax_type={softmax_type!r}": softmax_type != "vanilla", "return_max_logit": return_max_logit,
        })  # fmt: skip
        self.qkv_format, self.attn_mask_type, self.attention_dropout = qkv_format, attn_mask_type, attention_dropout
        self.attention_type = attention_type

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, bottom_right_diagonal=None, checkpoint_core_attention=False,
        core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
        inference_params=None, pad_between_seqs=None, fp8_output=False, num_splits=1, score_mod=None,
        score_mod_bprop=None, score_mod_tensors=None, score_mod_bprop_tensors=None,
    ):  # fmt: skip
        """Return the attention output; saves queries, keys, values, output, a float32 value per row, and RNG state."""
        check_on_gpu(_NAME, query_layer, key_layer, value_layer)
        layout = qkv_format or self.qkv_format
        mask = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        uses_flash = "flash_attn" in sys.modules and os.environ.get("NVTE_FLASH_ATTN", "1") != "0"
        capability = torch.cuda.get_device_capability()
        dtype, head = query_layer.dtype, query_layer.shape[-1]
        refuse_if(_NAME, {
            f"qkv_format={layout!r}": layout not in ("sbhd", "bshd"), f"attn_mask_type={mask!r}": mask not in _MASKS,
            "checkpoint_core_attention": checkpoint_core_attention, "inference_params": inference_params is not None,
            f"core_attention_bias_type={core_attention_bias_type!r}": core_attention_bias_type != "no_bias",
            "fp8_output": fp8_output, "score_mod": score_mod is not None,
            "flash-attn imported on a GPU before Hopper (NVTE_FLASH_ATTN=0 takes cuDNN's)": (
                uses_flash and capability < (9, 0)
            ),
            f"tensors of {dtype}, which take its attention without a fused kernel": dtype not in HALF,
            f"heads of {head}": head % 8 or head > _MAX_HEAD,
            f"a GPU of compute capability {'.'.join(map(str, capability))}": capability < (8, 0),
        })  # fmt: skip
        inputs, num_interleaved, dim = _get_qkv_layout((query_layer, key_layer, value_layer))
        batch_dim = layout.index("b")
        query, _, value = inputs
        batch, heads, tokens = query.shape[batch_dim], query.shape[-2], query.shape[1 - batch_dim]

        def make_bounds() -> torch.Tensor:
            return torch.empty(batch + 1, dtype=torch.int32, device=query.device)

        for length in {tokens, value.shape[1 - batch_dim]}:
            keep_for_run(("transformer_engine.cu_seqlens", batch, length, str(query.device)), make_bounds)
        has_grad = torch.is_grad_enabled()

        def forward_kernel(*tensors: torch.Tensor):
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            state = torch.empty(2, dtype=torch.int64, device=query.device)
            row_sums = query.new_empty((batch, heads, tokens, 1), dtype=torch.float32) if has_grad else None
            return out, (*tensors, out, row_sums, state)

        def backward_kernel(saved, gradient: torch.Tensor):
            gradient = gradient.contiguous()
            gradients = _allocate_gradients(saved[:3], num_interleaved, dim)
            size = batch * heads * tokens * (saved[0].shape[-1] + 1)
            accumulator = saved[0].new_empty(size, dtype=torch.float32)
            del accumulator
            return gradients

        out = kernel(forward_kernel, backward_kernel, *inputs)
        return out.view(*out.shape[:2], -1)


class _Split(torch.autograd.Function):
    """torch.split with a backward that joins the gradients without a copy if they are adjacent in one tensor."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int, sizes: tuple[int, ...]):
        ctx.dim, ctx.sizes = dim, sizes
        return torch.split(x, list(sizes), dim=dim)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        first = gradients[0]
        dim = ctx.dim % first.dim()
        inner_size = first.shape[dim + 1 :].numel()
        offset = 0
        for gradient, size in zip(gradients, ctx.sizes, strict=True):
            has_same_storage = gradient.untyped_storage()._cdata == first.untyped_storage()._cdata
            if not has_same_storage or gradient.stride() != first.stride() or gradient.storage_offset() != offset:
                return torch.cat(gradients, dim=dim), None, None
            offset += size * inner_size
        shape = [*first.shape[:dim], sum(ctx.sizes), *first.shape[dim + 1 :]]
        return first.as_strided(shape, first.stride()), None, None


@register("attention.rope", "attention")
class RotaryPositionEmbedding(nn.Module):
    """A module that returns the rotary angles of each position, in float32."""

    def __init__(
        self, dim, rotary_percent=1.0, seq_len_interpolation_factor=None, pretrained_max_position_embeddings=None,
        rotary_base=10000.0, interleaved=False,
    ):  # fmt: skip
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=torch.cuda.current_device())
        self.register_buffer("inv_freq", 1.0 / rotary_base ** (steps / dim))
        self.interleaved = interleaved
        self._factors = (seq_len_interpolation_factor, pretrained_max_position_embeddings)

    def forward(self, max_seq_len, offset=0):
        """Return the angles [max_seq_len, 1, 1, dim] of positions from `offset` on."""
        frequencies: Any = self.inv_freq
        with torch.autocast("cuda", enabled=False):
            positions = torch.arange(max_seq_len, device=frequencies.device, dtype=frequencies.dtype) + offset
            if None not in self._factors:
                positions *= 1 / self._factors[0]
            angles = torch.einsum("i,j->ij", positions, frequencies)
        if self.interleaved:
            doubled = torch.stack((angles.view(-1, 1), angles.view(-1, 1)), dim=-1).view(angles.shape[0], -1)
        else:
            doubled = torch.cat((angles, angles), dim=-1)
        return doubled.reshape(doubled.size(0), 1, 1, doubled.size(1))


def apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return a rotated copy of `x`; saves `angles` in float32 (FusedRoPEFunc)."""

    def forward_kernel(x: torch.Tensor):
        return x.new_empty(x.shape), (angles.float(),)

    return kernel(forward_kernel, lambda saved, gradient: (gradient.new_empty(gradient.shape),), x)


@register("attention.multi_head_attention", "attention")
class MultiheadAttention(nn.Module):
    """Multi-head attention: a projection to queries, keys and values, attention, and an output projection."""

    def __init__(
        self, hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-5,
        init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type="causal", window_size=None,
        bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, fuse_wgrad_accumulation=False,
        get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, return_bias=False,
        return_layernorm_output=False, input_layernorm=False, attention_type="self", set_parallel_mode=False,
        fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, rotary_pos_interleaved=False,
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        bias=True, normalization="LayerNorm", device="cuda", qkv_format="sbhd", name=None, qk_norm_type=None,
        qk_norm_eps=1e-6, qk_norm_before_rope=False, seq_length=None, micro_batch_size=None, softmax_type="vanilla",
    ):  # fmt: skip
        super().__init__()
        refuse_if("transformer_engine.pytorch.MultiheadAttention", {
            f"attention_type={attention_type!r}": attention_type != "self",
            f"qk_norm_type={qk_norm_type!r}": qk_norm_type is not None, "tensor parallelism": tp_group or tp_size != 1,
            f"qkv_format={qkv_format!r}": qkv_format not in ("sbhd", "bshd"),
        })  # fmt: skip
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.size = kv_channels or hidden_size // num_attention_heads
        self.groups = num_gqa_groups or num_attention_heads
        self.group_size = num_attention_heads // self.groups
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        query, key = self.size * num_attention_heads, self.size * self.groups
        split_sizes = None if fuse_qkv_params else {"query": query, "key": key, "value": key}
        options: dict[str, Any] = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "params_dtype": params_dtype, "device": device,
            "bias": bias,
        }  # fmt: skip
        mode = "column" if set_parallel_mode else None
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, query + 2 * key, eps=layernorm_epsilon, init_method=init_method, parallel_mode=mode,
                return_layernorm_output=return_layernorm_output, parameters_split=split_sizes,
                zero_centered_gamma=zero_centered_gamma, normalization=normalization, **options,
            )  # fmt: skip
        else:
            self.qkv = Linear(
                hidden_size, query + 2 * key, init_method=init_method, parallel_mode=mode, parameters_split=split_sizes,
                **options,
            )  # fmt: skip
        self.core_attention = DotProductAttention(
            num_attention_heads, self.size, num_gqa_groups=self.groups, attention_dropout=attention_dropout,
            qkv_format=qkv_format, softmax_type=softmax_type,
        )  # fmt: skip
        self.proj = Linear(
            query, hidden_size, init_method=output_layer_init_method, return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None, **options,
        )  # fmt: skip

    def forward(
        self, hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None,
        bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False, inference_params=None,
        rotary_pos_emb=None, core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None,
    ):  # fmt: skip
        """Return the output, with the shape of `hidden_states`; with return_bias or norm output, a tuple."""
        normed = None
        if self.input_layernorm:
            qkv = self.layernorm_qkv(hidden_states, is_first_microbatch=is_first_microbatch)
            if self.return_layernorm_output:
                qkv, normed = qkv
        else:
            qkv = self.qkv(hidden_states, is_first_microbatch=is_first_microbatch)
        head_shape = (self.groups, self.group_size + 2) if self.interleaved else (self.group_size + 2, self.groups)
        qkv = qkv.view(*qkv.shape[:-1], *head_shape, self.size)
        groups = _Split.apply(qkv, -2 if self.interleaved else -3, (self.group_size, 1, 1))
        query, key, value = (t.reshape(*t.shape[:2], -1, self.size) for t in groups)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            query, key = apply_rotary(query, angles[0]), apply_rotary(key, angles[1])
        context = self.core_attention(
            query, key, value, attention_mask=attention_mask, attn_mask_type=attn_mask_type or self.attn_mask_type,
            window_size=window_size or self.window_size, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes, inference_params=inference_params,
        )  # fmt: skip
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = (*(out if self.return_bias else (out,)), *(() if normed is None else (normed,)))
        return outputs if len(outputs) > 1 else outputs[0]
