"""Scaled dot-product attention: the backend that CUDA chooses, and what cuDNN's takes.

And the fast paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in evaluation, step by step: each is one
operator, which on meta tensors shows its result alone (native/transformers/transformer.cpp and cuda/attention.cu).

Sources: native/transformers/cuda/sdp_utils.cpp (choice), native/transformers/attention.cpp (the paths),
native/transformers/cuda/attention.cu and native/cudnn/MHA.cpp (cuDNN), attention_backward.cu and flash_attn/ in
native/transformers/cuda (the other backward passes), and for cuDNN's workspace cudnn-frontend,
node/scaled_dot_product_flash_attention.h.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memprof.torch_private import kernels
from memprof.virtual.device_properties import DeviceProperties, cudnn_version
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.activations import dropout
from memprof.virtual.kernels.registry import META, aten, composite, kernel, scratch

_HALF = (torch.float16, torch.bfloat16)

_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # numbers of `torch.nn.attention.SDPBackend`
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
# Release from which the memory-efficient kernel takes grouped queries (pull request 191085, summer 2026).
_EFFICIENT_GROUPS_SINCE = (2, 15)

WORKSPACE = (
    "The workspace of cuDNN's attention is counted as its open frontend sizes it and as it was on an H100 with cuDNN "
    "9.19, to the byte for seven sizes; the closed library may take another elsewhere."
)
# What cuDNN adds to every call's: H100, cuDNN 9.19, torch 2.11.0+cu130.
_CUDNN_WORKSPACE_BYTES = 256


def prefers_cudnn(gpu: DeviceProperties) -> bool:
    """Return whether cuDNN comes first (check_prefer_cudnn_attention): on compute capability 9 and 10 since torch 2.11.

    The rule asks for a cuDNN newer than 9.15.0, which PyPI's wheels have since 2.11; those of 2.9, whose rule requested
    less, were built with one that is too old (issue 165801).
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return cudnn_version(gpu.release) > 91_500 and gpu.compute_capability[0] in (9, 10)


@dataclass
class Attention:
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_grad(self) -> bool:
        """Return whether a backward pass will follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


@composite(kernels.scaled_dot_product_attention)
def attention(machine: DeviceState, *args: Any, **kwargs: Any) -> Any:
    """Run `scaled_dot_product_attention` as the chosen backend does."""
    call = Attention(*args, **kwargs)
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if not machine.is_on_gpu(query):
        return NotImplemented
    chosen = backend(machine.gpu, call)
    machine.values.assume(f"Attention runs on the {chosen} backend of scaled_dot_product_attention.")
    if chosen == "math":
        return _math_attention(machine, call)
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    if chosen == "flash":
        padded = (_padded(tensor) for tensor in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(*padded, call.dropout_p, call.is_causal, scale=scale)
        return result[0][..., :head_dim] if result[0].shape[-1] != head_dim else result[0]
    needs_grad = call.needs_grad
    if chosen == "cudnn":
        if needs_grad:
            machine.values.assume(WORKSPACE)
        if mask is not None and mask.dtype is torch.bool:
            mask = _additive(mask, query)
        operator = aten._scaled_dot_product_cudnn_attention
    else:
        mask = None if mask is None else _additive_mask(mask, query, key)
        operator = aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, mask, needs_grad, call.dropout_p, call.is_causal, scale=scale)[0]


def backend(gpu: DeviceProperties, call: Attention) -> str:
    """Return the first backend, in CUDA's order, that is enabled and can do it (select_sdp_backend)."""
    query, key, value = call.query, call.key, call.value
    fused = (
        query.dim() == key.dim() == value.dim() == 4
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in (query, key, value))
        and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)  # not so T5's: its biases of positions, permuted
        and query.shape[2] > 0
        and key.shape[2] > 0
    )
    heads = query.shape[1], key.shape[1], value.shape[1] if value.dim() > 1 else 0
    grouped = fused and not heads[0] == heads[1] == heads[2]
    if grouped and not (call.enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0):
        fused = False
    for name in _order(gpu):
        if name == "math":
            possible = torch.backends.cuda.math_sdp_enabled()
        elif name == "efficient":
            possible = fused and _efficient_can(gpu, call, grouped)
        else:
            possible = fused and (_cudnn_can if name == "cudnn" else _flash_can)(gpu, call)
        if possible:
            return name
    # As scaled_dot_product_attention says it when the allowed backends cannot do it.
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(gpu: DeviceProperties) -> tuple[str, ...]:
    """The order that the program set, or the default, in which cuDNN may come first."""
    numbers = kernels.get_sdp_priority_order()
    order = tuple(dict.fromkeys(_NAMES[number] for number in numbers if number in _NAMES))  # 2.8 names one twice
    if order == _DEFAULT_ORDER and prefers_cudnn(gpu):
        return ("cudnn", "flash", "efficient", "math")
    return order


def _cudnn_can(gpu: DeviceProperties, call: Attention) -> bool:
    """can_use_cudnn_attention; heads of up to 128, on compute capability 9.0 of up to 256 from cuDNN 9.10 on, on 10 of
    192 with values of 128."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    dims = query.shape[-1], value.shape[-1]
    major, minor = gpu.compute_capability
    hopper = (major, minor) == (9, 0) and cudnn_version(gpu.release) >= 91_000
    limit = 256 if hopper else 192 if dims == (192, 128) and major == 10 else 128
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= (major, minor) <= (12, 1)
        and query.dtype in _HALF
        and not (mask is not None and mask.requires_grad)
        and not _must_be_deterministic()
        and query.shape[-1] == key.shape[-1]
        and max(dims) <= limit
        and all(dim % 8 == 0 for dim in dims)
        and key.shape[2] != 1
        and not (call.dropout_p > 0 and query.shape[2] == 1)
    )


def _flash_can(gpu: DeviceProperties, call: Attention) -> bool:
    """Return whether FlashAttention can run (can_use_flash_attention)."""
    query, key, value, head_dim = call.query, call.key, call.value, call.query.shape[-1]
    capability = gpu.compute_capability
    small_shared_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.attn_mask is None
        and query.dtype in _HALF
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and head_dim <= 256
        and not (call.is_causal and query.shape[-2] != key.shape[-2])
        and not (
            small_shared_memory
            and (192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0))
            and call.needs_grad
        )
    )


def _efficient_can(gpu: DeviceProperties, call: Attention, grouped: bool) -> bool:
    """Return whether the memory-efficient kernel can run (can_use_mem_efficient_attention)."""
    query, key, value, capability = call.query, call.key, call.value, gpu.compute_capability
    half = query.dtype in _HALF
    alignment = 8 if half else 4 if capability >= (8, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and not (grouped and gpu.release < _EFFICIENT_GROUPS_SINCE)
        and capability >= (5, 0)
        and query.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def _math_attention(machine: DeviceState, call: Attention) -> torch.Tensor:
    """The generic path, operator by operator as `_scaled_dot_product_attention_math` runs without modes.

    Under a mode C++ would add the mask out of place and take the CPU's dropout
    (aten/src/ATen/native/transformers/attention.cpp).
    """
    query, key, value, mask, dropout_p = call.query, call.key, call.value, call.attn_mask, call.dropout_p
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = (query.shape[-1] ** -0.5 if call.scale is None else call.scale) ** 0.5
    query = query * root
    if call.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = _additive(mask, query)
    if call.enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = kernels.safe_softmax(scores, -1)
    if dropout_p > 0:
        dropped = dropout(machine, scores, dropout_p)
        scores = torch.dropout(scores, dropout_p, True) if dropped is NotImplemented else dropped
    result = (scores @ value).to(dtype)
    # The operator returns the scores too, in the input's dtype; SDPA drops them.
    scores.to(dtype)
    return result


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Head dimension padded to a multiple of 8, as flash attention needs it."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A boolean mask as zeros and minus infinities of the query's dtype."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _additive_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the efficient kernel takes it: additive, its rows aligned to 16 elements, expanded over the heads."""
    if mask.dtype is torch.bool:
        mask = _additive(mask, query)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])


def _must_be_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@scratch(aten._scaled_dot_product_flash_attention_backward)
def flash_attention_backward(args: Any, gpu: DeviceProperties) -> list[int]:
    """Accumulators of the flash attention backward: dq in float32 and the row sums softmax_d (flash_api.cpp, mha_bwd).

    With grouped queries, dk and dv are first made for every query head and then summed.
    """
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rounded_length = _round_up(length, 128)
    rounded_head = _round_up(head_dim, 32) if head_dim <= 128 else _round_up(head_dim, 64)
    sizes = [4 * batch * heads * rounded_length, 4 * batch * rounded_length * heads * rounded_head]
    if key.shape[1] != heads:
        sizes += 2 * [query.element_size() * batch * key.shape[2] * heads * head_dim]
    return sizes


@kernel(aten._scaled_dot_product_efficient_attention)
def efficient_attention(launch: KernelContext) -> Any:
    """The output and its row sums; seed and offset of the dropout are on the host, except while a graph is captured."""
    output, sums, seed, offset = launch.func(*launch.args, **launch.kwargs)
    launch.record(output, sums)
    return output, sums, torch.zeros_like(seed, device="cpu"), torch.zeros_like(offset, device="cpu")


@kernel(aten._scaled_dot_product_efficient_attention_backward)
def efficient_attention_backward(launch: KernelContext) -> Any:
    """The gradients, and what the memory-efficient attention's backward takes by what SDPA passes to it."""
    query, key, value = launch.args[1:4]
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    made = launch.func(*launch.args, **launch.kwargs)
    launch.record(*made)
    _take_for_backward(launch, query, value, (batch, queries), (batch, heads, queries, keys), launch.args[9])
    return made


@kernel(aten._efficient_attention_backward)
def efficient_attention_backward_of_any(launch: KernelContext) -> Any:
    """Run the backward of the operator that libraries call; with `cu_seqlens` its batch is concatenated sequences."""
    query, key, value, bias = launch.args[1:5]
    bounds = launch.args[6]
    batch, rows, heads, _ = query.shape
    sequences = (batch, rows, key.shape[1]) if bounds is None else (bounds.shape[0] - 1, *launch.args[8:10])
    made = [launch.new(one.shape, one.dtype) for one in (query, key, value)]
    of_bias = None
    if launch.args[15]:  # the last dimension is aligned to 16
        of_bias = launch.new((*bias.shape[:-1], _round_up(bias.shape[-1], 16)), bias.dtype)
    blocks = (sequences[0], heads, *sequences[1:])
    _take_for_backward(launch, query, value, (batch, rows), blocks, launch.args[11])
    return *made, of_bias if of_bias is None else of_bias[..., : bias.shape[-1]]


def _take_for_backward(
    launch: KernelContext, query: torch.Tensor, value: torch.Tensor, rows: Any, blocks: Any, dropout_p: float
) -> None:
    """Row sums in float32 and a workspace (attention_backward.cu, mem_eff_attention/kernel_backward.h, workspace_size):
    gradients of queries in tiles, and those of keys and values where registers do not hold them in half precision.

    `rows` are batch and queries; `blocks` are sequences, heads, and the most queries and keys of one.
    """
    gpu, half = launch.gpu, query.dtype in _HALF
    sums = 4 * rows[0] * blocks[1] * rows[1]
    tile = _efficient_tile(gpu, half, max(query.shape[-1], value.shape[-1]), dropout_p > 0)
    in_registers = half and tile.most <= tile.rows
    with contextlib.ExitStack() as held:
        if half and (in_registers or gpu.compute_capability[0] != 7 or gpu.compute_capability >= (7, 5)):
            held.enter_context(launch.scratch(sums))  # the kernel makes them
        else:
            # By operators: in half precision copies in float32, a product, its sums, and those in another order.
            product = [sums * value.shape[-1]] * (3 if half else 1)
            with launch.scratch(*product, sums):
                held.enter_context(launch.scratch(sums))
        # Only what registers do not hold of half precision is summed in splits.
        splitting = half and not in_registers
        launch.transients(_workspace_of_backward(gpu, tile, blocks, query, value, splitting=splitting))


def _workspace_of_backward(
    gpu: DeviceProperties, tile: _Tile, blocks: Any, query: torch.Tensor, value: torch.Tensor, *, splitting: bool
) -> int:
    batch, heads, queries, keys = blocks
    head, head_v = query.shape[-1], value.shape[-1]
    block_i, block_j, _ = tile
    splits = -(-keys // block_j)
    if batch * heads >= 256 and keys <= 2 * block_j:
        splits = 1
    elements = 0
    if splitting:
        splits = min(splits, 200 // (batch * heads))
    if splits < 1 or _must_be_deterministic():
        splits = 1
    if splitting:
        elements = splits * block_j * (_round_up(head, block_i) + _round_up(head_v, block_i))
    if gpu.compute_capability >= (7, 0) or query.dtype in _HALF:
        elements += -(-queries // block_i) * -(-head // block_j) * (4 + block_i * block_j)
    return 4 * batch * heads * _round_up(elements, 4)


class _Tile(NamedTuple):
    """The part of the work of one block of threads."""

    rows: int
    columns: int
    most: int  # the largest head


def _efficient_tile(gpu: DeviceProperties, half: bool, head: int, drops: bool) -> _Tile:
    """Rows, columns and the largest head of the kernel that is launched: the first whose heads are as large, with 128
    rows where a block of threads may have as much shared memory as that takes (mem_eff_attention/kernels/cutlassB.h).
    """
    capability = gpu.compute_capability
    if half and not drops and capability in ((8, 6), (8, 9)) and 64 < head <= 96:
        return _Tile(128, 64, 96)
    most = next((size for size in (32, 64, 128) if head <= size), 2**16)
    much = (capability[0] in (8, 9, 10) and capability not in ((8, 6), (8, 9))) or (half and capability < (7, 5))
    rows = 128 if most > 64 and much else 64
    ahead = half and capability >= (8, 0) and most <= rows
    return _Tile(rows, 128 if ahead and most > 64 else 64, most)


def _matching(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An output with the order of dimensions of the queries (alloc_with_matching_layout)."""
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=query.stride):
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=META)


@kernel(aten._scaled_dot_product_cudnn_attention)
def cudnn_attention(launch: KernelContext) -> Any:
    """Seed and offset of the dropout, used or not, the output, and for a backward the row sums in float32."""
    query, key, value = launch.args[:3]
    needs_sums = launch.args[4]
    batch, heads, length, _ = query.shape
    seed, offset = (torch.empty((), dtype=torch.int64, device=META) for _ in range(2))
    output = _matching(query, (batch, heads, length, value.shape[-1]))
    sums = torch.empty(batch, heads, length, 1, dtype=torch.float32, device=META) if needs_sums else None
    launch.record(seed, offset, output, sums)
    launch.transients(_CUDNN_WORKSPACE_BYTES)
    return output, sums, None, None, length, key.shape[2], seed, offset, None


@kernel(aten._scaled_dot_product_cudnn_attention_backward)
def cudnn_attention_backward(launch: KernelContext) -> Any:
    """The gradients, and as workspace that of the queries in float32 with a row sum for each of them; with grouped
    queries those of keys and values for every head of the queries."""
    query, key, value = launch.args[1:4]
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    launch.record(*grads)
    taken = _CUDNN_WORKSPACE_BYTES + 4 * query[..., 0].numel() * (query.shape[-1] + 1)
    for grouped in (key, value):
        if grouped.shape[1] != query.shape[1]:
            taken += grouped.numel() // grouped.shape[1] * query.shape[1] * grouped.element_size()
    launch.transients(taken)
    return grads


_linear = kernels.linear


@composite(kernels.native_multi_head_attention)
def multi_head_attention(
    machine: DeviceState,
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
    """Attend by a fused kernel where one can, else with the scores of every head."""
    same = query is key and key is value
    if not machine.is_on_gpu(query) or query.is_nested or not same or not query.numel():
        return NotImplemented
    batch, length, _ = query.shape
    width = embed_dim // num_heads
    if width % 8 == 0 and not need_weights and mask is None:
        heads = query.view(batch, -1, num_heads, width).transpose(1, 2)
        if backend(machine.gpu, Attention(heads, heads, heads)) != "math":
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
def layer(machine: DeviceState, src: torch.Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Any:
    """Run attention, both norms and the feed-forward network; the activation is part of a matrix product.

    `rest` are weight and bias of both projections, whether to use GELU, whether the norm comes first, epsilon, weight
    and bias of both norms and of both linear layers, the mask and its type (_transformer_encoder_layer_fwd).
    """
    projections, (use_gelu, norm_first, eps), norms, linears = rest[:4], rest[4:7], rest[7:11], rest[11:15]
    mask, mask_type = (*rest[15:], None, None)[:2]
    if not machine.is_on_gpu(src) or src.is_nested or not src.numel():
        return NotImplemented
    shape = (embed_dim,)
    first, second = (*norms[:2], eps), (*norms[2:], eps)
    x = torch.layer_norm(src, shape, *first) if norm_first else src
    options: tuple[Any, ...] = (*projections, mask, False, True, mask_type)
    x = multi_head_attention(machine, x, x, x, embed_dim, num_heads, *options)[0]
    x.add_(src)
    if not norm_first:
        x = torch.layer_norm(x, shape, *first)
    residual = x
    if norm_first:
        x = torch.layer_norm(x, shape, *second)
    hidden = kernels.addmm_activation(linears[1], x.reshape(-1, embed_dim), linears[0].t(), use_gelu=use_gelu)
    x = _linear(hidden.view(*src.shape[:-1], -1), *linears[2:])
    del hidden
    x.add_(residual)
    return x if norm_first else torch.layer_norm(x, shape, *second)
