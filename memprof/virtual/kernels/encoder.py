"""The fast paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in evaluation, step by step.

Each is one operator, which on meta tensors shows its result alone.
Sources: native/transformers/transformer.cpp, native/transformers/cuda/attention.cu (native_multi_head_attention_cuda).
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.kernels.attention import attention, backend
from memprof.virtual.kernels.registry import composite
from memprof.virtual.machine import Machine

_linear = kernels.linear


@composite(kernels.native_multi_head_attention)
def multi_head_attention(
    machine: Machine,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Through a fused kernel where one can, else with the scores of every head."""
    same = query is key and key is value
    if not machine.is_on_card(query) or query.is_nested or not same or not query.numel():
        return NotImplemented
    batch, length, _ = query.shape
    width = embed_dim // num_heads
    if width % 8 == 0 and not need_weights and mask is None:
        heads = query.view(batch, -1, num_heads, width).transpose(1, 2)
        if backend(machine.card, heads, heads, heads, None, 0.0, False, False) != "math":
            parts = _linear(query, qkv_weight, qkv_bias).chunk(3, -1)
            queries, keys, values = (part.view(batch, -1, num_heads, width).transpose(1, 2) for part in parts)
            result = attention(machine, queries, keys, values).transpose(1, 2).reshape(batch, -1, embed_dim)
            return _linear(result, proj_weight, proj_bias), None
    projected = torch.matmul(query, qkv_weight.t())
    packed = projected.new_empty((3, batch * num_heads, length, width))
    del projected
    queries, keys, values = packed.unbind(0)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(batch, num_heads, length, length)
    weights = torch.softmax(scores, -1) if mask is None else kernels.masked_softmax(scores, mask, 3, mask_type)
    del scores
    torch.bmm(weights.view(-1, length, length), values, out=queries)
    if not need_weights:
        del weights
    context = queries.view(batch, num_heads, length, width).transpose(1, 2).reshape(batch, length, embed_dim)
    result = _linear(context, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.sum(1).div_(num_heads) if average_attn_weights else weights


@composite(kernels.transformer_encoder_layer_fwd)
def layer(
    machine: Machine,
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """Attention, both norms and the feed-forward network; the activation is part of a matrix product."""
    if not machine.is_on_card(src) or src.is_nested or not src.numel():
        return NotImplemented
    shape = (embed_dim,)
    first, second = (norm_weight_1, norm_bias_1, eps), (norm_weight_2, norm_bias_2, eps)
    x = torch.layer_norm(src, shape, *first) if norm_first else src
    x = multi_head_attention(
        machine,
        x,
        x,
        x,
        embed_dim,
        num_heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask,
        False,
        True,
        mask_type,
    )[0]
    x.add_(src)
    if not norm_first:
        x = torch.layer_norm(x, shape, *first)
    residual = x
    if norm_first:
        x = torch.layer_norm(x, shape, *second)
    hidden = kernels.addmm_activation(ffn_bias_1, x.reshape(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = _linear(hidden.view(*src.shape[:-1], -1), ffn_weight_2, ffn_bias_2)
    del hidden
    x.add_(residual)
    return x if norm_first else torch.layer_norm(x, shape, *second)
