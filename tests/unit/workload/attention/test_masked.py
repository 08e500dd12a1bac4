"""Block masks of a sliding window and of the fixed pattern, and flex_attention's memory with them."""

from __future__ import annotations

import pytest
import torch

import memprof
from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.workload.attention import masked

OTHERS = ("block-sparse", "flex_attention")


@pytest.mark.parametrize("kind", ["sliding", "block-sparse"])
@pytest.mark.parametrize(("queries", "keys", "window"), [(1500, 1500, 300), (1536, 1536, 128), (130, 1500, 200)])
def test_blocks_are_those_that_the_pattern_touches(kind: str, queries: int, keys: int, window: int) -> None:
    mask = masked.make_block_mask(kind, window, queries, keys, "cpu")
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None]
    seen = mask.mask_mod(None, None, rows, columns)
    at, block = rows + keys - queries, columns // 128
    if kind == "sliding":
        expected = (columns <= at) & (at - columns < window)
    else:
        expected = (columns <= at) & ((block == 0) | (block % 8 == 7) | (at // 128 - block < 8))
    assert (seen == expected).all()
    padded = torch.zeros(-(-queries // 128) * 128, -(-keys // 128) * 128, dtype=torch.bool)
    padded[:queries, :keys] = expected
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    assert (mask.to_dense()[0, 0].bool() == tiles.any(-1)).all()
    full = torch.zeros_like(tiles[..., 0])
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0]):
        full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    assert (full == tiles.all(-1)).all()


def test_a_window_beyond_the_text_is_causal_attention() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, 16, dtype=torch.float64) for _ in range(3))

    class Layer:
        class config:  # noqa: N801
            sliding_window = 300

    found, _ = masked.attention("sliding", Layer, query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)


def test_on_a_cpu_it_does_not_train() -> None:
    spec = TargetSpec(model="llama-3.2-1b", vocab_size=256, context_length=64, attention="sliding", device="cpu")
    with pytest.raises(UsageError, match="no backward on a CPU"):
        memprof.profile(spec)


@pytest.mark.parametrize("kind", ["sliding", *(pytest.param(k, marks=pytest.mark.nightly) for k in OTHERS)])
def test_no_mask_of_pairs_and_nothing_is_left_behind(kind: str) -> None:
    spec = TargetSpec(
        model="llama-3.2-1b", vocab_size=256, context_length=16_384, attention=kind, optimizer="sgd",
        activation_checkpointing=True,
    )  # fmt: skip
    report = memprof.profile(spec)[1]
    plain = memprof.profile(spec.edit(attention="sdpa"))[1]
    # Beside flash attention: the numbers of the mask's blocks, [128 x 128] four times.
    assert abs(report.peak.allocated_bytes - plain.peak.allocated_bytes) < 0.05 * plain.peak.allocated_bytes
    ends = [next(s for s in reversed(each.stages) if s.name == "zero_grad").allocated_bytes for each in (report, plain)]
    assert abs(ends[0] - ends[1]) < 1 << 20
