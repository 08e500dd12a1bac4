"""Scaled dot-product attention: the backend that CUDA chooses, and what cuDNN's takes.

Sources: native/transformers/cuda/sdp_utils.cpp (choice), native/transformers/attention.cpp (the paths),
native/transformers/cuda/attention.cu and native/cudnn/MHA.cpp (cuDNN), attention_backward.cu and flash_attn/ in
native/transformers/cuda (the other backward passes), and for cuDNN's workspace cudnn-frontend,
node/scaled_dot_product_flash_attention.h.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.card import Card, cudnn_version
from memprof.virtual.kernels.dropout import dropout
from memprof.virtual.kernels.registry import composite, kernel, scratch
from memprof.virtual.launch import Launch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten
_META = torch.device("meta")
_HALF = (torch.float16, torch.bfloat16)

_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Numbers of `torch.nn.attention.SDPBackend`."""
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
_EFFICIENT_GROUPS_SINCE = (2, 15)
"""Release from which the memory-efficient kernel takes grouped queries (pull request 191085, summer 2026)."""

WORKSPACE = (
    "The backward workspace of cuDNN's attention is counted as its open frontend sizes it (gradient of the queries and "
    "row sums in float32); what the closed library may add is not."
)


def prefers_cudnn(card: Card) -> bool:
    """Whether cuDNN comes first (check_prefer_cudnn_attention): on compute capability 9 and 10 from torch 2.11 on.

    The rule asks for a cuDNN newer than 9.15.0, which PyPI's wheels have since 2.11; those of 2.9, whose rule asked for
    less, were built with one that is too old (issue 165801).
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return cudnn_version(card.release) > 91_500 and card.compute_capability[0] in (9, 10)


@composite(kernels.scaled_dot_product_attention)
def attention(
    machine: Machine,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as the chosen backend runs it."""
    if not machine.is_on_card(query):
        return NotImplemented
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    chosen = backend(machine.card, query, key, value, attn_mask, dropout_p, is_causal, needs_grad, enable_gqa)
    machine.values.assume(f"Attention runs on the {chosen} backend of scaled_dot_product_attention.")
    if chosen == "math":
        return _math_attention(machine, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    head_dim = query.shape[-1]
    if scale is None:
        scale = head_dim**-0.5
    if chosen == "flash":
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
        result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return result[0][..., :head_dim] if result[0].shape[-1] != head_dim else result[0]
    if chosen == "cudnn":
        if needs_grad:
            machine.values.assume(WORKSPACE)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _additive(attn_mask, query)
        result = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
        )
        return result[0]
    if attn_mask is not None:
        attn_mask = _additive_mask(attn_mask, query, key)
    result = _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )
    return result[0]


def backend(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    needs_grad: bool,
    enable_gqa: bool = False,
) -> str:
    """The first backend, in CUDA's order, that is enabled and can do it (select_sdp_backend)."""
    fused = (
        query.dim() == key.dim() == value.dim() == 4
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in (query, key, value))
        and query.shape[2] > 0
        and key.shape[2] > 0
    )
    heads = query.shape[1], key.shape[1], value.shape[1] if value.dim() > 1 else 0
    grouped = fused and not heads[0] == heads[1] == heads[2]
    if grouped and not (enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0):
        fused = False
    for name in _order(card):
        if name == "math":
            if torch.backends.cuda.math_sdp_enabled():
                return name
        elif name == "cudnn":
            if fused and _cudnn_can(card, query, key, value, attn_mask, dropout_p):
                return name
        elif name == "flash":
            if fused and _flash_can(card, query, key, value, attn_mask, dropout_p, is_causal, needs_grad):
                return name
        elif fused and _efficient_can(card, query, key, value, grouped):
            return name
    # As scaled_dot_product_attention says it when the allowed backends cannot do it.
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(card: Card) -> tuple[str, ...]:
    """The order that the program set, or the default, in which cuDNN may come first."""
    numbers = kernels.get_sdp_priority_order()
    order = tuple(dict.fromkeys(_NAMES[number] for number in numbers if number in _NAMES))  # 2.8 names one twice
    if order == _DEFAULT_ORDER and prefers_cudnn(card):
        return ("cudnn", "flash", "efficient", "math")
    return order


def _cudnn_can(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
) -> bool:
    """can_use_cudnn_attention; heads of up to 128 (192 with values of 128 on compute capability 9.0 and 10)."""
    dims = query.shape[-1], value.shape[-1]
    major, minor = card.compute_capability
    limit = 192 if dims == (192, 128) and (major == 10 or (major, minor) == (9, 0)) else 128
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= (major, minor) <= (12, 1)
        and query.dtype in _HALF
        and not (attn_mask is not None and attn_mask.requires_grad)
        and not (torch.are_deterministic_algorithms_enabled() and not _only_warns())
        and query.shape[-1] == key.shape[-1]
        and max(dims) <= limit
        and all(dim % 8 == 0 for dim in dims)
        and key.shape[2] != 1
        and not (dropout_p > 0 and query.shape[2] == 1)
    )


def _flash_can(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    needs_grad: bool,
) -> bool:
    """can_use_flash_attention."""
    head_dim = query.shape[-1]
    capability = card.compute_capability
    small_shared_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and attn_mask is None
        and query.dtype in _HALF
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and head_dim <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and not (needs_grad and small_shared_memory and (192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0)))
    )


def _efficient_can(card: Card, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    """can_use_mem_efficient_attention."""
    capability = card.compute_capability
    half = query.dtype in _HALF
    alignment = 8 if half else 4 if capability >= (8, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and not (grouped and card.release < _EFFICIENT_GROUPS_SINCE)
        and capability >= (5, 0)
        and query.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def _math_attention(
    machine: Machine,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """The generic path, operator by operator as `_scaled_dot_product_attention_math` runs without modes.

    Under a mode C++ would add the mask out of place and take the CPU's dropout
    (aten/src/ATen/native/transformers/attention.cpp).
    """
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    query = query * root
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _additive(attn_mask, query)
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ (key.transpose(-2, -1) * root)
    if attn_mask is not None:
        scores.add_(attn_mask)
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


def _only_warns() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


# -- the operators -----------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@scratch(_aten._scaled_dot_product_flash_attention_backward)
def flash_attention_backward(args: Any, card: Card) -> list[int]:
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


@scratch(_aten._scaled_dot_product_efficient_attention_backward)
def efficient_attention_backward(args: Any, card: Card) -> list[int]:
    """Of the memory-efficient attention's backward, by what SDPA passes to it."""
    (batch, heads, queries, _), keys = args[1].shape, args[2].shape[2]
    return _efficient_backward(args[1], args[3], card, (batch, queries), (batch, heads, queries, keys), args[9])


@kernel(_aten._efficient_attention_backward)
def efficient_attention_backward_of_any(launch: Launch) -> Any:
    """The same, by the operator that libraries call; with `cu_seqlens` its batch is of sequences one after another."""
    query, key, value, bias = launch.args[1:5]
    bounds = launch.args[6]
    batch, rows, heads, _ = query.shape
    sequences = (batch, rows, key.shape[1]) if bounds is None else (bounds.shape[0] - 1, *launch.args[8:10])
    made = [torch.empty(one.shape, dtype=one.dtype, device=_META) for one in (query, key, value)]
    of_bias = None
    if launch.args[15]:  # the last dimension is aligned to 16
        shape = (*bias.shape[:-1], _round_up(bias.shape[-1], 16))
        of_bias = torch.empty(shape, dtype=bias.dtype, device=_META)
    launch.record(*made, of_bias)
    blocks = (sequences[0], heads, *sequences[1:])
    launch.transients(*_efficient_backward(query, value, launch.card, (batch, rows), blocks, launch.args[11]))
    return *made, of_bias if of_bias is None else of_bias[..., : bias.shape[-1]]


def _efficient_backward(
    query: torch.Tensor,
    value: torch.Tensor,
    card: Card,
    rows: tuple[int, int],
    blocks: tuple[int, int, int, int],
    dropout_p: float,
) -> list[int]:
    """Row sums in float32 and a workspace (attention_backward.cu, mem_eff_attention/kernel_backward.h, workspace_size):
    gradients of queries in tiles, and those of keys and values where registers do not hold them in half precision.

    Args:
        rows: batch and queries, of which there is a sum for each head.
        blocks: sequences, heads, and the most queries and keys of one.
    """
    batch, heads, queries, keys = blocks
    head, head_v, half = query.shape[-1], value.shape[-1], query.dtype in _HALF
    block_i, block_j, most = _efficient_tile(card, half, max(head, head_v), dropout_p > 0)
    in_registers = half and most <= block_i
    splits = -(-keys // block_j)
    if batch * heads >= 256 and keys <= 2 * block_j:
        splits = 1
    elements = 0
    if half and not in_registers:
        splits = min(splits, 200 // (batch * heads))
    if splits < 1 or (torch.are_deterministic_algorithms_enabled() and not _only_warns()):
        splits = 1
    if half and not in_registers:
        elements += splits * block_j * (_round_up(head, block_i) + _round_up(head_v, block_i))
    if card.compute_capability >= (7, 0) or half:
        elements += -(-queries // block_i) * -(-head // block_j) * (4 + block_i * block_j)
    sums = 4 * rows[0] * heads * rows[1]
    taken = [sums, 4 * batch * heads * _round_up(elements, 4)]
    if half and (in_registers or card.compute_capability[0] != 7 or card.compute_capability >= (7, 5)):
        return taken
    # The sums are made by operators: copies in float32, a product, its sums, and those in another order.
    before = [sums * head_v] * (3 if half else 1) + [sums, sums]
    return max(taken, before, key=sum)


def _efficient_tile(card: Card, half: bool, head: int, drops: bool) -> tuple[int, int, int]:
    """Rows, columns and the largest head of the kernel that is launched: the first whose heads are as large, with 128
    rows where a block of threads may have as much shared memory as that takes (mem_eff_attention/kernels/cutlassB.h).
    """
    capability = card.compute_capability
    if half and not drops and capability in ((8, 6), (8, 9)) and 64 < head <= 96:
        return 128, 64, 96
    most = next((size for size in (32, 64, 128) if head <= size), 2**16)
    much = (capability[0] in (8, 9, 10) and capability not in ((8, 6), (8, 9))) or (half and capability < (7, 5))
    rows = 128 if most > 64 and much else 64
    ahead = half and capability >= (8, 0) and most <= rows
    return rows, 128 if ahead and most > 64 else 64, most


def _matching(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An output with the order of dimensions of the queries (alloc_with_matching_layout)."""
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=query.stride):
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=_META)


@kernel(_aten._scaled_dot_product_cudnn_attention)
def cudnn_attention(launch: Launch) -> Any:
    """Seed and offset of the dropout, used or not, the output, and for a backward the row sums in float32."""
    query, key, value = launch.args[:3]
    needs_sums = launch.args[4]
    batch, heads, length, _ = query.shape
    seed, offset = (torch.empty((), dtype=torch.int64, device=_META) for _ in range(2))
    output = _matching(query, (batch, heads, length, value.shape[-1]))
    sums = torch.empty(batch, heads, length, 1, dtype=torch.float32, device=_META) if needs_sums else None
    launch.record(seed, offset, output, sums)
    return output, sums, None, None, length, key.shape[2], seed, offset, None


@kernel(_aten._scaled_dot_product_cudnn_attention_backward)
def cudnn_attention_backward(launch: Launch) -> Any:
    """The gradients, and as workspace that of the queries in float32 with a row sum for each of them."""
    query, key, value = launch.args[1:4]
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    launch.record(*grads)
    launch.transients(4 * query[..., 0].numel() * (query.shape[-1] + 1))
    return grads
