"""Bytes of flashinfer: what functions return, workspaces that are kept, buffers of the length of a call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import measured

MIB = 1024 * 1024
SEQUENCES, HEADS, KV_HEADS, SIZE, PAGE, PAGES = 4, 8, 2, 64, 16, 40
ROWS, VOCABULARY = 3, 1000


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.float16)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


CACHE = (PAGES, 2, PAGE, KV_HEADS, SIZE)
# Where each sequence's pages begin, which they are, and how many tokens the last of each has.
PAGED = [(0, 2, 4, 6, 8), tuple(range(8)), (3, 5, 16, 1)]


def test_a_wrapper_keeps_a_workspace_beside_the_programs(gpu: VirtualGpu) -> None:
    import flashinfer

    workspace = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    stays, peak, wrapper = measured(lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD"))
    assert (stays, peak) == (8 * MIB, 8 * MIB)
    lists = [numbers(*each) for each in PAGED]
    stays, _, _ = measured(lambda: wrapper.plan(*lists, HEADS, KV_HEADS, SIZE, PAGE, q_data_type=torch.float16))
    assert stays == 4 * (SEQUENCES + 1)  # where rows begin; the lists lie on the GPU
    q, cache = half(SEQUENCES, HEADS, SIZE), half(*CACHE)
    stays, peak, (out, sums) = measured(lambda: wrapper.run(q, cache, return_lse=True))
    assert (out.shape, sums.shape) == (q.shape, (SEQUENCES, HEADS))
    slopes = 4 * HEADS  # kept, also where no slopes are used
    assert stays == q.nbytes + 4 * SEQUENCES * HEADS + slopes
    assert measured(lambda: wrapper.run(q, cache, out=out))[:2] == (0, 0)


def test_a_prefill_of_pages_begins_with_zeros_and_a_ragged_one_does_not(gpu: VirtualGpu) -> None:
    import flashinfer

    workspace = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    stays, _, paged = measured(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace))
    assert stays == 8 * MIB + 4 * 32768
    starts = numbers(0, 10, 20, 30, 40)
    paged.plan(starts, *(numbers(*each) for each in PAGED), HEADS, KV_HEADS, SIZE, PAGE, causal=True)
    q = half(40, HEADS, SIZE)
    out = paged.run(q, (half(PAGES, PAGE, KV_HEADS, SIZE), half(PAGES, PAGE, KV_HEADS, SIZE)))
    assert out.shape == q.shape
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    ragged.plan(starts, starts, HEADS, KV_HEADS, SIZE, causal=True)
    keys = half(40, KV_HEADS, SIZE)
    assert measured(lambda: ragged.run(q, keys, keys))[:2] == (q.nbytes, q.nbytes)


def test_a_fast_plan_copies_no_indices(gpu: VirtualGpu) -> None:
    import flashinfer

    workspace = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    indptr, indices, last = (numbers(*each) for each in PAGED)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_cuda_graph=True, paged_kv_indptr_buffer=indptr, paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last,
    )  # fmt: skip
    assert wrapper._paged_kv_indices_buf is indices  # engines write into it
    plan = partial(flashinfer.fast_decode_plan, wrapper, indptr, indices, last, HEADS, KV_HEADS, SIZE, PAGE)
    assert measured(lambda: plan(q_data_type=torch.float16, data_type=torch.float16))[:2] == (0, 0)
    q, cache = half(SEQUENCES, HEADS, SIZE), half(*CACHE)
    assert measured(lambda: wrapper.run(q, cache))[0] == q.nbytes + 4 * HEADS  # with slopes, which stay


def test_one_sequence_takes_32_mib_while_it_runs(gpu: VirtualGpu) -> None:
    import flashinfer

    q, keys = half(100, HEADS, SIZE), half(300, KV_HEADS, SIZE)
    stays, peak, out = measured(lambda: flashinfer.single_prefill_with_kv_cache(q, keys, keys, causal=True))
    assert (out.shape, stays, peak) == (q.shape, q.nbytes, q.nbytes + 32 * MIB)
    token = half(HEADS, SIZE)
    stays, peak, _ = measured(lambda: flashinfer.single_decode_with_kv_cache(token, keys, keys))
    assert (stays, peak) == (token.nbytes, token.nbytes + 32 * MIB)
    assert len(flashinfer.single_prefill_with_kv_cache_return_lse(q, keys, keys)) == 2


def test_tokens_go_into_pages_where_they_lie(gpu: VirtualGpu) -> None:
    import flashinfer

    cache, new = half(*CACHE), half(SEQUENCES, KV_HEADS, SIZE)
    starts, lists = numbers(0, 1, 2, 3, 4), [numbers(*each) for each in PAGED]
    stays, _, (rows, places) = measured(
        lambda: flashinfer.get_batch_indices_positions(starts, numbers(19, 21, 32, 17), SEQUENCES)
    )
    assert stays == 2 * 4 * SEQUENCES
    call = flashinfer.append_paged_kv_cache
    indices, indptr, last = lists[1], lists[0], lists[2]
    assert measured(lambda: call(new, new, rows, places, cache, indices, indptr, last))[:2] == (0, 0)
    long = rows.long()
    peak = measured(lambda: call(new, new, long, places, cache, indices, indptr, last))[1]
    assert peak == 4 * SEQUENCES  # numbers in another type are copied
    with pytest.raises(RuntimeError, match="float32"):
        call(new.float(), new, rows, places, cache, indices, indptr, last)


PROBABILITIES = 4 * ROWS * VOCABULARY


@pytest.mark.parametrize(
    ("name", "arguments", "stays", "peak"),
    [
        ("sampling_from_logits", (), 4 * ROWS, 4 * ROWS),
        ("sampling_from_probs", (), 4 * ROWS, 5 * ROWS),  # and whether each is a token
        ("top_p_sampling_from_probs", (0.9,), 4 * ROWS, 5 * ROWS),
        ("top_k_sampling_from_probs", (40,), 4 * ROWS, 5 * ROWS),
        ("min_p_sampling_from_probs", (0.1,), 4 * ROWS, 5 * ROWS),
        ("top_k_mask_logits", (40,), MIB + PROBABILITIES, MIB + PROBABILITIES),
        ("top_k_renorm_probs", (40,), MIB + PROBABILITIES, MIB + PROBABILITIES),
        ("softmax", (), MIB + PROBABILITIES, MIB + PROBABILITIES),
        # Counters, two histograms and two lists of 256 numbers a row, each in 256 bytes.
        ("top_p_renorm_probs", (0.9,), PROBABILITIES, PROBABILITIES + 1280 + 2 * 4 * 2048 * ROWS + 2 * 4 * 256 * ROWS),
    ],
)
def test_sampling_sorts_nothing(gpu: VirtualGpu, name: str, arguments: tuple[Any, ...], stays: int, peak: int) -> None:
    import flashinfer

    rows = torch.empty(ROWS, VOCABULARY, device="cuda")
    call = getattr(flashinfer, name)
    assert measured(lambda: call(rows, *arguments))[:2] == (stays, peak)


def test_probabilities_in_half_precision_are_sampled_from_in_single(gpu: VirtualGpu) -> None:
    import flashinfer

    rows = half(ROWS, VOCABULARY)
    peak = measured(lambda: flashinfer.sampling_from_probs(rows))[1]
    assert peak == PROBABILITIES + 5 * ROWS
    assert measured(lambda: flashinfer.top_k_mask_logits(rows, 40))[0] == MIB + rows.nbytes


def test_few_of_a_large_vocabulary_are_found_first(gpu: VirtualGpu) -> None:
    import flashinfer

    logits = torch.empty(ROWS, 100_000, device="cuda")
    stays, peak, tokens = measured(lambda: flashinfer.top_k_top_p_sampling_from_logits(logits, 50, 0.9))
    assert (tokens.shape, tokens.dtype) == ((ROWS,), torch.int32)
    assert stays == MIB + 4 * ROWS
    assert peak < MIB + logits.nbytes // 100  # nothing as large as the logits
    many = measured(lambda: flashinfer.top_k_top_p_sampling_from_logits(logits, 500, 0.9))
    assert many[1] >= 2 * logits.nbytes


@pytest.mark.parametrize(
    ("name", "shape", "stays"),
    [("silu_and_mul", (5, 32), 5 * 16 * 2), ("gelu_and_mul", (5, 32), 160), ("gelu_tanh_and_mul", (5, 32), 160)],
)
def test_gates_give_half(gpu: VirtualGpu, name: str, shape: tuple[int, ...], stays: int) -> None:
    import flashinfer

    x, call = half(*shape), getattr(flashinfer, name)
    made = measured(lambda: call(x))
    assert made[:2] == (stays, stays)
    assert measured(lambda: call(x, out=made[2]))[:2] == (0, 0)
    with pytest.raises(ValueError, match="16 bytes"):
        call(half(5, 7))


def test_norms_and_rotations_write_where_they_are_told(gpu: VirtualGpu) -> None:
    import flashinfer

    x, weight = half(10, 64), half(64)
    assert measured(lambda: flashinfer.rmsnorm(x, weight))[:2] == (x.nbytes, x.nbytes)
    assert measured(lambda: flashinfer.fused_add_rmsnorm(x, x.clone(), weight))[0] == 0
    q, k, places = half(10, HEADS, SIZE), half(10, KV_HEADS, SIZE), numbers(*range(10))
    assert measured(lambda: flashinfer.apply_rope_pos_ids(q, k, places))[0] == q.nbytes + k.nbytes
    assert measured(lambda: flashinfer.apply_rope_pos_ids_inplace(q, k, places))[0] == 0
    with pytest.raises(RuntimeError, match="a weight of"):
        flashinfer.rmsnorm(x, half(32))
    with pytest.raises(ValueError, match="float32"):
        flashinfer.apply_rope_with_cos_sin_cache(places, q, k, SIZE, half(10, SIZE))


def test_what_is_not_known_is_refused_by_name(gpu: VirtualGpu) -> None:
    import flashinfer

    workspace = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(MemprofError, match='BatchDecodeWithPagedKVCacheWrapper with backend="trtllm-gen"'):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, backend="trtllm-gen")
    with pytest.raises(KeyError, match="NDH"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NDH")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    starts = numbers(0, 4)
    with pytest.raises(MemprofError, match="with custom_mask"):
        wrapper.plan(starts, starts, HEADS, KV_HEADS, SIZE, custom_mask=torch.ones(16, device="cuda"))
    with pytest.raises(MemprofError, match="float8"):
        wrapper.plan(starts, starts, HEADS, KV_HEADS, SIZE, q_data_type=torch.float8_e4m3fn)
    wrapper.plan(starts, starts, HEADS, KV_HEADS, SIZE)
    with pytest.raises(ValueError, match="does not match the q_data_type"):
        wrapper.run(half(4, HEADS, SIZE).float(), half(4, KV_HEADS, SIZE), half(4, KV_HEADS, SIZE))
    with pytest.raises(MemprofError, match=r"flashinfer\.decode\.trtllm_batch_decode_with_kv_cache"):
        flashinfer.decode.trtllm_batch_decode_with_kv_cache()
    with pytest.raises(TypeError, match="made_up"):
        flashinfer.rmsnorm(half(4, 8), half(8), made_up=1)
