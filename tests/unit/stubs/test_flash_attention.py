"""Bytes of flash-attn and FlashAttention 3, forward and backward, as flash_api.cpp allocates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")
BATCH, TOKENS, HEADS, SHARED, SIZE = 2, 1000, 16, 4, 80
SUMS = 4 * BATCH * HEADS * TOKENS
STATE = 16  # Two integers of a random state.


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)


def half(*shape: int) -> int:
    return 2 * torch.Size(shape).numel()


def single(*shape: int) -> int:
    return 4 * torch.Size(shape).numel()


def measured(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """What stays, and the most beyond it, in bytes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result


def backward(out: torch.Tensor) -> int:
    """The most that it takes: the gradients, and what there is beside them. What was saved is freed after that."""
    gradient = torch.empty_like(out)
    return measured(lambda: out.backward(gradient))[1]


def test_grouped_queries_and_padded_rows(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_func

    q, k, v = tensor(BATCH, TOKENS, HEADS, SIZE), *(tensor(BATCH, TOKENS, SHARED, SIZE) for _ in range(2))
    stays, peak, out = measured(lambda: flash_attn_func(q, k, v, causal=True))
    query, key = half(BATCH, TOKENS, HEADS, SIZE), half(BATCH, TOKENS, SHARED, SIZE)
    assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    assert stays == peak == query + SUMS + STATE
    rows = single(BATCH, HEADS, 1024)
    accumulated = single(BATCH, 1024, HEADS, 96)
    assert backward(out) == query + 2 * key + rows + accumulated + 2 * query


def test_a_deterministic_backward_accumulates_for_each_part(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_func

    q, k, v = (tensor(1, 256, 4, 64) for _ in range(3))
    out = flash_attn_func(q, k, v, deterministic=True)
    parts = -(-GPU.num_sms // 4)
    assert backward(out) == 3 * half(256, 4, 64) + single(4, 256) + single(parts, 256, 4, 64)


def test_heads_are_padded_to_eight(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_func

    q, k, v = (tensor(BATCH, TOKENS, HEADS, 60) for _ in range(3))
    stays, _, out = measured(lambda: flash_attn_func(q, k, v))
    assert out.shape[-1] == 60 and out.stride(-2) == 64
    assert stays == 4 * half(BATCH, TOKENS, HEADS, 64) + SUMS + STATE


def test_few_rows_split_the_keys(gpu: VirtualGpu) -> None:
    """By num_splits_heuristic: 4 blocks for 2 x 132 multiprocessors, 32 blocks of keys."""
    from flash_attn import flash_attn_func

    with torch.no_grad():
        q, k, v = tensor(1, 64, 4, 128), *(tensor(1, 4096, 4, 128) for _ in range(2))
        stays, peak, _ = measured(lambda: flash_attn_func(q, k, v))
    assert peak == half(64, 4, 128) + single(4, 64) + single(32, 4, 64) + single(32, 4, 64, 128) + STATE
    assert stays == half(64, 4, 128)


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"])
def test_packed_gradients_are_one_tensor(gpu: VirtualGpu, name: str) -> None:
    import flash_attn

    call = getattr(flash_attn, name)
    if "varlen" in name:
        qkv = tensor(BATCH * TOKENS, 3, HEADS, SIZE)
        bounds = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32, device="cuda")
        stays, _, out = measured(lambda: call(qkv, bounds, TOKENS, 0.0, causal=True))
        rows = BATCH * TOKENS + 128 * BATCH
        scratch = single(HEADS, rows) + single(rows, HEADS, 96)
    else:
        qkv = tensor(BATCH, TOKENS, 3, HEADS, SIZE)
        stays, _, out = measured(lambda: call(qkv, causal=True))
        scratch = single(BATCH, HEADS, 1024) + single(BATCH, 1024, HEADS, 96)
    assert stays == half(BATCH, TOKENS, HEADS, SIZE) + SUMS + STATE
    packed = half(BATCH, TOKENS, 3, HEADS, SIZE)
    assert backward(out) == packed + scratch


def test_probabilities_are_returned_where_dropout_asks_for_them(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_kvpacked_func

    q, kv = tensor(BATCH, 200, HEADS, 64), tensor(BATCH, 300, 2, HEADS, 64)
    _, sums, scores = flash_attn_kvpacked_func(q, kv, 0.1, return_attn_probs=True)
    assert (sums.shape, sums.dtype) == ((BATCH, HEADS, 200), torch.float32)
    assert scores.shape == (BATCH, HEADS, 256, 384)
    assert flash_attn_kvpacked_func(q, kv, 0.0, return_attn_probs=True)[2].shape == (0,)


def test_a_cache_is_filled_in_place(gpu: VirtualGpu) -> None:
    from flash_attn import flash_attn_with_kvcache

    with torch.no_grad():
        q, new = tensor(4, 1, 16, 128), tensor(4, 1, 16, 128)
        cache = [tensor(4, 512, 16, 128) for _ in range(2)]
        stays, _, out = measured(lambda: flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=17, num_splits=1))
    assert out.shape == q.shape
    assert stays == half(4, 16, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_real_one_refuses(gpu: VirtualGpu, dtype: torch.dtype) -> None:
    from flash_attn import flash_attn_func

    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        flash_attn_func(*[tensor(1, 8, 2, 64, dtype=dtype)] * 3)
    with pytest.raises(RuntimeError, match="on CUDA"):
        flash_attn_func(*[torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)] * 3)


def test_padding_is_taken_away_and_put_back(gpu: VirtualGpu) -> None:
    from flash_attn.bert_padding import pad_input, unpad_input

    x = torch.ones(2, 6, 4, 8, device="cuda", requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]], device="cuda")
    tokens, indices, bounds, longest, used = unpad_input(x, mask)
    assert tokens.shape == (8, 4, 8) and indices.tolist() == [0, 1, 2, 6, 7, 8, 9, 10]
    assert (bounds.tolist(), longest, used.tolist()) == ([0, 3, 8], 5, [3, 5])
    again = pad_input(tokens, indices, 2, 6)
    assert again.shape == x.shape
    again.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_flash_attention_3_on_hopper(gpu: VirtualGpu) -> None:
    from flash_attn_interface import flash_attn_func

    q, k, v = tensor(BATCH, TOKENS, HEADS, SIZE), *(tensor(BATCH, TOKENS, SHARED, SIZE) for _ in range(2))
    stays, peak, out = measured(lambda: flash_attn_func(q, k, v, causal=True))
    query, key = half(BATCH, TOKENS, HEADS, SIZE), half(BATCH, TOKENS, SHARED, SIZE)
    assert (stays, peak) == (query + SUMS, query + SUMS + 4)  # a counter for the scheduler
    # Heads of 80 run as 96, on blocks of 64 rows and 128 columns.
    scratch = 2 * single(BATCH, HEADS, 1024) + single(BATCH, HEADS, 1024, 96) + 2 * single(BATCH, SHARED, 1024, 96)
    assert backward(out) == query + 2 * key + scratch + single(16, BATCH, HEADS)


def test_flash_attention_3_of_several_lengths(gpu: VirtualGpu) -> None:
    from flash_attn_interface import flash_attn_varlen_func

    q, k, v = (tensor(BATCH * TOKENS, HEADS, 128) for _ in range(3))
    bounds = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32, device="cuda")
    stays, peak, out = measured(lambda: flash_attn_varlen_func(q, k, v, bounds, bounds, TOKENS, TOKENS))
    query = half(BATCH, TOKENS, HEADS, 128)
    assert (stays, peak) == (query + SUMS, query + SUMS + 4 * (1 + BATCH))
    rows = -(-(BATCH * TOKENS + BATCH * 80) // 80) * 80  # blocks of 80 rows without a mask
    scratch = 2 * single(HEADS, rows) + single(HEADS, rows, 128) + single(13, BATCH, HEADS)
    assert backward(out) == 3 * query + scratch


def test_flash_attention_3_refuses_what_it_does_not_know(gpu: VirtualGpu) -> None:
    from flash_attn_interface import flash_attn_combine, flash_attn_func

    with pytest.raises(MemprofError, match=r"flash_attn_interface\.flash_attn_func with attention_chunk=64"):
        flash_attn_func(*[tensor(1, 8, 2, 64)] * 3, attention_chunk=64)
    with pytest.raises(MemprofError, match=r"flash_attn_interface\.flash_attn_combine"):
        flash_attn_combine(None, None)
