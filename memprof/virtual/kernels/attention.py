"""Scaled dot-product attention (SDPA): the choice of the backend on CUDA, and the memory of each backend.

The module also runs the fused evaluation operators of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` step by
step (native/transformers/transformer.cpp and cuda/attention.cu).

Sources: native/transformers/cuda/sdp_utils.cpp (choice), native/transformers/attention.cpp (math backend),
native/transformers/cuda/attention.cu and native/cudnn/MHA.cpp (cuDNN), attention_backward.cu and flash_attn/ in
native/transformers/cuda (backward passes), and for cuDNN's workspace cudnn-frontend,
node/scaled_dot_product_flash_attention.h.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memprof.allocator.releases import Change
from memprof.torch_private import kernels
from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.activations import dropout
from memprof.virtual.kernels.registry import META, aten, composite, kernel, scratch

_HALF_DTYPES = (torch.float16, torch.bfloat16)

_BACKEND_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # numbers of `torch.nn.attention.SDPBackend`
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")

WORKSPACE_ASSUMPTION = (
    "The workspace of cuDNN's attention is counted as its open frontend sizes it and as it was on an H100 with cuDNN "
    "9.19, to the byte for seven sizes; the closed library may take another elsewhere."
)
# Constant part of cuDNN's workspace: H100, cuDNN 9.19, torch 2.11.0+cu130.
_CUDNN_WORKSPACE_BYTES = 256


def prefers_cudnn(gpu: DeviceProperties) -> bool:
    """Return whether SDPA tries cuDNN first: on compute capability 9 and 10, since torch 2.11.

    torch requires cuDNN above 9.15.0 for it, which PyPI's wheels have since 2.11 (pytorch issue 165801).
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return gpu.cudnn_version > 91_500 and gpu.compute_capability[0] in (9, 10)


@dataclass
class AttentionArguments:
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
        """Return whether autograd records the call for a backward pass."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


@composite(kernels.scaled_dot_product_attention)
def attention(device_state: DeviceState, *args: Any, **kwargs: Any) -> Any:
    """Run `scaled_dot_product_attention` by the operators of the chosen backend."""
    call = AttentionArguments(*args, **kwargs)
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if not device_state.is_on_gpu(query):
        return NotImplemented
    backend_name = choose_backend(device_state.gpu, call)
    device_state.values.assume(f"Attention runs on the {backend_name} backend of scaled_dot_product_attention.")
    if backend_name == "math":
        is_native = device_state.gpu.device_type == "mps" and not (call.needs_grad or call.dropout_p)
        return _attention_of_mps(call) if is_native else _math_attention(device_state, call)
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    if backend_name == "flash":
        padded_inputs = (_pad_head_dim(tensor) for tensor in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(*padded_inputs, call.dropout_p, call.is_causal, scale=scale)
        return result[0][..., :head_dim] if result[0].shape[-1] != head_dim else result[0]
    needs_grad = call.needs_grad
    if backend_name == "cudnn":
        if needs_grad:
            device_state.values.assume(WORKSPACE_ASSUMPTION)
        if mask is not None and mask.dtype is torch.bool:
            mask = _to_additive_mask(mask, query)
        operator = aten._scaled_dot_product_cudnn_attention
    else:
        mask = None if mask is None else _align_mask(mask, query, key)
        operator = aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, mask, needs_grad, call.dropout_p, call.is_causal, scale=scale)[0]


def choose_backend(gpu: DeviceProperties, call: AttentionArguments) -> str:
    """Return the first backend, in CUDA's order, that is enabled and supports `call` (select_sdp_backend)."""
    query, key, value = call.query, call.key, call.value
    fits_fused_kernels = (
        query.dim() == key.dim() == value.dim() == 4
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in (query, key, value))
        and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)  # false for T5's permuted position biases
        and query.shape[2] > 0
        and key.shape[2] > 0
    )
    num_heads = query.shape[1], key.shape[1], value.shape[1] if value.dim() > 1 else 0
    is_grouped = fits_fused_kernels and not num_heads[0] == num_heads[1] == num_heads[2]
    if is_grouped and not (call.enable_gqa and num_heads[1] == num_heads[2] and num_heads[0] % num_heads[1] == 0):
        fits_fused_kernels = False
    for name in _find_backend_order(gpu):
        if name == "math":
            is_available = torch.backends.cuda.math_sdp_enabled()
        elif name == "efficient":
            is_available = fits_fused_kernels and _can_use_efficient(gpu, call, is_grouped)
        elif name == "overrideable":
            is_available = fits_fused_kernels and _can_use_overrideable(call, is_grouped)
        else:
            is_available = fits_fused_kernels and (_can_use_cudnn if name == "cudnn" else _can_use_flash)(gpu, call)
        if is_available:
            return name
    # The message of torch's scaled_dot_product_attention.
    raise RuntimeError("No available kernel. Aborting execution.")


def _find_backend_order(gpu: DeviceProperties) -> tuple[str, ...]:
    """Return the names of the backends in the order that the program set, or in `gpu`'s default order. MPS has no fused
    kernel with a backward (native/transformers/attention.cpp)."""
    if gpu.device_type != "cuda":
        return ("overrideable", "math") if gpu.device_type == "xpu" else ("math",)
    backend_ids = kernels.get_sdp_priority_order()
    order = tuple(
        dict.fromkeys(_BACKEND_NAMES[backend_id] for backend_id in backend_ids if backend_id in _BACKEND_NAMES)
    )  # 2.8 names one twice
    if order == _DEFAULT_ORDER and prefers_cudnn(gpu):
        return ("cudnn", "flash", "efficient", "math")
    return order


def _can_use_cudnn(gpu: DeviceProperties, call: AttentionArguments) -> bool:
    """Return whether cuDNN supports `call` (can_use_cudnn_attention): head dimensions up to 128, up to 256 on compute
    capability 9.0 with cuDNN 9.10 or later, and 192 with value heads of 128 on compute capability 10."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    head_dims = query.shape[-1], value.shape[-1]
    major, minor = gpu.compute_capability
    has_wide_heads = (major, minor) == (9, 0) and gpu.cudnn_version >= 91_000
    max_head_dim = 256 if has_wide_heads else 192 if head_dims == (192, 128) and major == 10 else 128
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= (major, minor) <= (12, 1)
        and query.dtype in _HALF_DTYPES
        and not (mask is not None and mask.requires_grad)
        and not _is_deterministic()
        and query.shape[-1] == key.shape[-1]
        and max(head_dims) <= max_head_dim
        and all(dim % 8 == 0 for dim in head_dims)
        and key.shape[2] != 1
        and not (call.dropout_p > 0 and query.shape[2] == 1)
    )


def _can_use_flash(gpu: DeviceProperties, call: AttentionArguments) -> bool:
    """Return whether FlashAttention supports `call` (can_use_flash_attention)."""
    query, key, value, head_dim = call.query, call.key, call.value, call.query.shape[-1]
    capability = gpu.compute_capability
    has_small_shared_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.attn_mask is None
        and query.dtype in _HALF_DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and head_dim <= 256
        and not (call.is_causal and query.shape[-2] != key.shape[-2])
        and not (
            has_small_shared_memory
            and (192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0))
            and call.needs_grad
        )
    )


def _can_use_efficient(gpu: DeviceProperties, call: AttentionArguments, is_grouped: bool) -> bool:
    """Return whether the memory-efficient kernel supports `call` (can_use_mem_efficient_attention)."""
    query, key, value, capability = call.query, call.key, call.value, gpu.compute_capability
    is_half = query.dtype in _HALF_DTYPES
    alignment = 8 if is_half else 4 if capability >= (8, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and not (is_grouped and not Change.EFFICIENT_GROUPS.is_in(gpu.release))
        and capability >= (5, 0)
        and query.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def _can_use_overrideable(call: AttentionArguments, is_grouped: bool) -> bool:
    """Return whether oneDNN's kernel for XPU supports `call` (use_overrideable_xpu, native/mkldnn/xpu/Attention.cpp).
    It allocates what the memory-efficient kernel does: the output, row sums for a backward, and there the gradients."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    return (
        query.dtype in (torch.float32, *_HALF_DTYPES)
        and not call.dropout_p
        and query.shape[-1] == key.shape[-1]
        and max(query.shape[-1], value.shape[-1]) <= 576
        and not (call.needs_grad and is_grouped)
        and not (mask is not None and mask.requires_grad)
    )


def _attention_of_mps(call: AttentionArguments) -> torch.Tensor:
    """Return the output of the operator that MPS has where no gradient is needed, which makes the scores beside it, in
    the query's dtype (native/mps/operations/Attention.mm, sdpa_general_mps). What its graph takes is not known."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = _to_additive_mask(mask, query)
    key, value = _repeat_grouped_heads(call, key, value)
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    query.new_empty((*query.shape[:-1], key.shape[-2]))
    return output


def _repeat_grouped_heads(
    call: AttentionArguments, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value with as many heads as the query (pre_process_group_query_attention_input)."""
    if not call.enable_gqa or key.shape[1] == call.query.shape[1]:
        return key, value
    group_size = call.query.shape[1] // key.shape[1]
    return key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)


def _math_attention(device_state: DeviceState, call: AttentionArguments) -> torch.Tensor:
    """Run the operators that `_scaled_dot_product_attention_math` runs without a dispatch mode.

    Under a dispatch mode, the C++ function adds the mask out of place and uses the CPU's dropout
    (aten/src/ATen/native/transformers/attention.cpp).
    """
    query, key, value, mask, dropout_p = call.query, call.key, call.value, call.attn_mask, call.dropout_p
    dtype = query.dtype
    if dtype in _HALF_DTYPES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    sqrt_scale = (query.shape[-1] ** -0.5 if call.scale is None else call.scale) ** 0.5
    query = query * sqrt_scale
    if call.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = _to_additive_mask(mask, query)
    key, value = _repeat_grouped_heads(call, key, value)
    scores = query @ (key.transpose(-2, -1) * sqrt_scale)
    if mask is not None:
        scores.add_(mask)
    scores = kernels.safe_softmax(scores, -1)
    if dropout_p > 0:
        dropout_result = dropout(device_state, scores, dropout_p)
        scores = torch.dropout(scores, dropout_p, True) if dropout_result is NotImplemented else dropout_result
    result = (scores @ value).to(dtype)
    # The operator returns the scores too, in the input's dtype; SDPA drops them.
    scores.to(dtype)
    return result


def _pad_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with its last dimension, the head dimension, padded to a multiple of 8 for FlashAttention."""
    num_padding = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, num_padding)) if num_padding else tensor


def _to_additive_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the boolean `mask` with 0 for True and -inf for False, in the dtype of `query`."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _align_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return `mask` for the memory-efficient kernel: additive, rows aligned to 16 elements, expanded over the heads."""
    if mask.dtype is torch.bool:
        mask = _to_additive_mask(mask, query)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@scratch(aten._scaled_dot_product_flash_attention_backward)
def compute_flash_backward_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the query gradient in float32 and of the row sums softmax_d (flash_api.cpp, mha_bwd).

    With grouped queries, also of key and value gradients for every query head, which are summed afterwards.
    """
    query, key = args[1], args[2]
    batch, num_heads, length, head_dim = query.shape
    rounded_length = round_up(length, 128)
    rounded_head_dim = round_up(head_dim, 32) if head_dim <= 128 else round_up(head_dim, 64)
    sizes = [4 * batch * num_heads * rounded_length, 4 * batch * rounded_length * num_heads * rounded_head_dim]
    if key.shape[1] != num_heads:
        sizes += 2 * [query.element_size() * batch * key.shape[2] * num_heads * head_dim]
    return sizes


@kernel(aten._scaled_dot_product_efficient_attention)
def efficient_attention(launch: KernelContext) -> Any:
    """Allocate the output and its row sums. Dropout seed and offset are host tensors, except in a CUDA graph."""
    output, row_sums, seed, offset = launch.func(*launch.args, **launch.kwargs)
    launch.record(output, row_sums)
    return output, row_sums, torch.zeros_like(seed, device="cpu"), torch.zeros_like(offset, device="cpu")


@kernel(aten._scaled_dot_product_efficient_attention_backward)
def efficient_attention_backward(launch: KernelContext) -> Any:
    """Allocate the gradients of query, key and value, then the temporaries of the memory-efficient backward kernel."""
    query, key, value = launch.args[1:4]
    (batch, heads, q_len, _), k_len = query.shape, key.shape[2]
    grads = launch.func(*launch.args, **launch.kwargs)
    launch.record(*grads)
    _allocate_for_backward(launch, query, value, (batch, q_len), (batch, heads, q_len, k_len), launch.args[9])
    return grads


@kernel(aten._efficient_attention_backward)
def general_efficient_attention_backward(launch: KernelContext) -> Any:
    """Run the memory-efficient backward that libraries call; `cu_seqlens` has the bounds of concatenated sequences."""
    query, key, value, bias = launch.args[1:5]
    cu_seqlens = launch.args[6]
    batch, rows, heads, _ = query.shape
    sizes = (batch, rows, key.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, *launch.args[8:10])
    grads = [launch.new(tensor.shape, tensor.dtype) for tensor in (query, key, value)]
    bias_grad = None
    if launch.args[15]:  # the last dimension is aligned to 16
        bias_grad = launch.new((*bias.shape[:-1], round_up(bias.shape[-1], 16)), bias.dtype)
    qk_shape = (sizes[0], heads, *sizes[1:])
    _allocate_for_backward(launch, query, value, (batch, rows), qk_shape, launch.args[11])
    return *grads, bias_grad if bias_grad is None else bias_grad[..., : bias.shape[-1]]


def _allocate_for_backward(
    launch: KernelContext, query: torch.Tensor, value: torch.Tensor, q_shape: Any, qk_shape: Any, dropout_p: float
) -> None:
    """Allocate float32 row sums and the workspace of `attention_backward.cu` (kernel_backward.h, workspace_size): query
    gradients in tiles, and key and value gradients where registers are too few.

    `q_shape` is (batch, queries); `qk_shape` is (sequences, heads, longest query, longest key).
    """
    gpu, is_half = launch.gpu, query.dtype in _HALF_DTYPES
    sums_bytes = 4 * q_shape[0] * qk_shape[1] * q_shape[1]
    tile = _choose_efficient_tile(gpu, is_half, max(query.shape[-1], value.shape[-1]), dropout_p > 0)
    fits_in_registers = is_half and tile.max_head_dim <= tile.rows
    with contextlib.ExitStack() as stack:
        if is_half and (fits_in_registers or gpu.compute_capability[0] != 7 or gpu.compute_capability >= (7, 5)):
            stack.enter_context(launch.scratch(sums_bytes))  # allocated by the kernel
        else:
            # Separate operators: in half precision copies in float32, a product, the sums, and a transposed copy.
            product_buffers = [sums_bytes * value.shape[-1]] * (3 if is_half else 1)
            with launch.scratch(*product_buffers, sums_bytes):
                stack.enter_context(launch.scratch(sums_bytes))
        # Half precision is summed in splits where registers are too few.
        is_split = is_half and not fits_in_registers
        launch.transients(_compute_backward_workspace(gpu, tile, qk_shape, query, value, is_split=is_split))


def _compute_backward_workspace(
    gpu: DeviceProperties, tile: _Tile, qk_shape: Any, query: torch.Tensor, value: torch.Tensor, *, is_split: bool
) -> int:
    batch, heads, q_len, k_len = qk_shape
    head_dim, value_head_dim = query.shape[-1], value.shape[-1]
    block_i, block_j, _ = tile
    num_elements = 0
    if is_split:
        num_splits = 1 if _is_deterministic() else max(1, min(-(-k_len // block_j), 200 // (batch * heads)))
        num_elements = num_splits * block_j * (round_up(head_dim, block_i) + round_up(value_head_dim, block_i))
    if gpu.compute_capability >= (7, 0) or query.dtype in _HALF_DTYPES:
        num_elements += -(-q_len // block_i) * -(-head_dim // block_j) * (4 + block_i * block_j)
    return 4 * batch * heads * round_up(num_elements, 4)


class _Tile(NamedTuple):
    """Tile of the attention scores that one thread block computes."""

    rows: int
    columns: int
    max_head_dim: int  # the largest head dimension that the kernel supports


def _choose_efficient_tile(gpu: DeviceProperties, is_half: bool, head_dim: int, has_dropout: bool) -> _Tile:
    """Return the tile of the launched kernel: of the first kernel that supports `head_dim`, with 128 rows where the
    shared memory of a thread block is large enough (mem_eff_attention/kernels/cutlassB.h)."""
    capability = gpu.compute_capability
    if is_half and not has_dropout and capability in ((8, 6), (8, 9)) and 64 < head_dim <= 96:
        return _Tile(128, 64, 96)
    max_head_dim = next((size for size in (32, 64, 128) if head_dim <= size), 2**16)
    has_enough_shared_memory = (capability[0] in (8, 9, 10) and capability not in ((8, 6), (8, 9))) or (
        is_half and capability < (7, 5)
    )
    rows = 128 if max_head_dim > 64 and has_enough_shared_memory else 64
    is_pipelined = is_half and capability >= (8, 0) and max_head_dim <= rows
    return _Tile(rows, 128 if is_pipelined and max_head_dim > 64 else 64, max_head_dim)


def _empty_like_query(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an empty tensor of `shape` with the dimension order of `query` (alloc_with_matching_layout)."""
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    strides = [0] * len(shape)
    stride = 1
    for dim in sorted(range(len(shape)), key=query.stride):
        strides[dim] = stride
        stride *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=META)


@kernel(aten._scaled_dot_product_cudnn_attention)
def cudnn_attention(launch: KernelContext) -> Any:
    """Allocate seed and offset of the dropout (always), the output, and for a backward pass the float32 row sums."""
    query, key, value = launch.args[:3]
    needs_sums = launch.args[4]
    batch, num_heads, length, _ = query.shape
    seed, offset = (torch.empty((), dtype=torch.int64, device=META) for _ in range(2))
    output = _empty_like_query(query, (batch, num_heads, length, value.shape[-1]))
    row_sums = torch.empty(batch, num_heads, length, 1, dtype=torch.float32, device=META) if needs_sums else None
    launch.record(seed, offset, output, row_sums)
    launch.transients(_CUDNN_WORKSPACE_BYTES)
    return output, row_sums, None, None, length, key.shape[2], seed, offset, None


@kernel(aten._scaled_dot_product_cudnn_attention_backward)
def cudnn_attention_backward(launch: KernelContext) -> Any:
    """Allocate the gradients and a workspace: a float32 gradient and row sum for each query and, with grouped queries,
    key and value gradients for every query head."""
    query, key, value = launch.args[1:4]
    grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    launch.record(*grads)
    workspace_bytes = _CUDNN_WORKSPACE_BYTES + 4 * query[..., 0].numel() * (query.shape[-1] + 1)
    for tensor in (key, value):
        if tensor.shape[1] != query.shape[1]:
            workspace_bytes += tensor.numel() // tensor.shape[1] * query.shape[1] * tensor.element_size()
    launch.transients(workspace_bytes)
    return grads


_linear = kernels.linear


@composite(kernels.native_multi_head_attention)
def multi_head_attention(
    device_state: DeviceState,
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
    """Run `nn.MultiheadAttention`'s fast path: fused SDPA if a backend supports it, else with a full score matrix."""
    is_self_attention = query is key and key is value
    if not device_state.is_on_gpu(query) or query.is_nested or not is_self_attention or not query.numel():
        return NotImplemented
    batch, length, _ = query.shape
    head_dim = embed_dim // num_heads
    if head_dim % 8 == 0 and not need_weights and mask is None:
        split_heads = query.view(batch, -1, num_heads, head_dim).transpose(1, 2)
        if choose_backend(device_state.gpu, AttentionArguments(split_heads, split_heads, split_heads)) != "math":
            projections = _linear(query, qkv_weight, qkv_bias).chunk(3, -1)
            queries, keys, values = (part.view(batch, -1, num_heads, head_dim).transpose(1, 2) for part in projections)
            result = attention(device_state, queries, keys, values).transpose(1, 2).reshape(batch, -1, embed_dim)
            return _linear(result, proj_weight, proj_bias), None
    projection = torch.matmul(query, qkv_weight.t())
    qkv = projection.new_empty((3, batch * num_heads, length, head_dim))
    del projection
    queries, keys, values = qkv.unbind(0)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(batch, num_heads, length, length)
    weights = torch.softmax(scores, -1) if mask is None else kernels.masked_softmax(scores, mask, 3, mask_type)
    del scores
    torch.bmm(weights.view(-1, length, length), values, out=queries)
    if not need_weights:
        del weights
    context = queries.view(batch, num_heads, length, head_dim).transpose(1, 2).reshape(batch, length, embed_dim)
    result = _linear(context, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.sum(1).div_(num_heads) if average_attn_weights else weights


@composite(kernels.transformer_encoder_layer_fwd)
def encoder_layer(device_state: DeviceState, src: torch.Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Any:
    """Run attention, both norms and the feed-forward network, whose activation is fused into a matrix product.

    `rest`: weights and biases of both projections, use_gelu, norm_first, eps, weights and biases of both norms and of
    both linear layers, then optionally mask and mask type (torch's `_transformer_encoder_layer_fwd`).
    """
    projections, (use_gelu, norm_first, eps), norms, linears = rest[:4], rest[4:7], rest[7:11], rest[11:15]
    mask, mask_type = (*rest[15:], None, None)[:2]
    if not device_state.is_on_gpu(src) or src.is_nested or not src.numel():
        return NotImplemented
    normalized_shape = (embed_dim,)
    first_norm, second_norm = (*norms[:2], eps), (*norms[2:], eps)
    x = torch.layer_norm(src, normalized_shape, *first_norm) if norm_first else src
    options: tuple[Any, ...] = (*projections, mask, False, True, mask_type)
    x = multi_head_attention(device_state, x, x, x, embed_dim, num_heads, *options)[0]
    x.add_(src)
    if not norm_first:
        x = torch.layer_norm(x, normalized_shape, *first_norm)
    residual = x
    if norm_first:
        x = torch.layer_norm(x, normalized_shape, *second_norm)
    hidden = kernels.addmm_activation(linears[1], x.reshape(-1, embed_dim), linears[0].t(), use_gelu=use_gelu)
    x = _linear(hidden.view(*src.shape[:-1], -1), *linears[2:])
    del hidden
    x.add_(residual)
    return x if norm_first else torch.layer_norm(x, normalized_shape, *second_norm)
