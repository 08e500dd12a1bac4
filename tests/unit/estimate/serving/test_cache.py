"""vLLM's KV cache: pages, groups and tokens, by hand and as published logs print them."""

from __future__ import annotations

import pytest

from memprof.estimate.serving.cache import CacheLayout, build_layout
from memprof.estimate.serving.lookup import load_served_model
from memprof.serving.releases import read_vllm_rules
from memprof.units import GIB


def layout(
    name: str, release: str, tokens: int = 2048, dtype: str = "auto", ranks: int = 1, **options: bool
) -> CacheLayout:
    return build_layout(load_served_model(name), read_vllm_rules(release), ranks, dtype, tokens, **options)


def test_equal_layers_are_one_group() -> None:
    found = layout("llama-3.1-8b", "0.19.0")
    assert found.block_bytes == 32 * 2 * 16 * 8 * 128 * 2
    assert (len(found.groups), found.block_size) == (1, 16)
    assert found.count_request_blocks(8192) == 512


def test_key_heads_are_divided_over_ranks() -> None:
    assert layout("llama-3.1-8b", "0.19.0", ranks=4).block_bytes * 4 == layout("llama-3.1-8b", "0.19.0").block_bytes
    assert layout("llama-3.1-8b", "0.19.0", ranks=16).block_bytes * 8 == layout("llama-3.1-8b", "0.19.0").block_bytes


# Published logs: model, release, tokens of a step, dtype, GiB of cache, max_model_len, tokens printed.
LOGS = [
    ("gpt-oss-120b", "0.10.1.1", 2048, "auto", 45.32, 16384, 2_640_144, {"ranks": 4}),
    ("Qwen/Qwen3.6-35B-A3B", "0.19.2", 2048, "auto", 47.55, 131072, 623_040, {"prefix_caching": False}),
    ("Qwen/Qwen3.5-4B", "0.29.0", 2048, "auto", 9.1, 32768, 267_842, {}),
    ("google/gemma-3-12b-it", "0.22.0", 2048, "auto", 59.15, 8192, 335_944, {}),
    ("google/gemma-3-12b-it", "0.22.0", 2048, "nvfp4", 53.1, 8192, 1_072_364, {}),
    ("google/gemma-4-12B-it", "0.22.0", 16384, "auto", 58.34, 8192, 181_726, {}),
    ("google/gemma-4-26B-A4B-it", "0.22.0", 2048, "auto", 33.72, 8192, 370_652, {}),
    ("google/gemma-3-1b-it", "0.22.0", 2048, "auto", 10.39, 8192, 943_654, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "release", "step", "dtype", "gib", "length", "tokens", "options"), LOGS)
def test_tokens_of_published_logs(
    name: str, release: str, step: int, dtype: str, gib: float, length: int, tokens: int, options: dict[str, int]
) -> None:
    found = layout(name, release, step, dtype, **options).count_tokens(int(gib * GIB), length)  # type: ignore[arg-type]
    assert found == pytest.approx(tokens, rel=0.001)  # The cache is printed to 0.01 GiB.


def test_latent_attention_has_one_vector() -> None:
    found = layout("deepseek-ai/DeepSeek-V2-Lite-Chat", "0.19.0")
    assert found.block_bytes == 27 * 64 * 576 * 2
    assert layout("deepseek-ai/DeepSeek-V2-Lite-Chat", "0.19.0", is_latent_block_large=False).block_size == 16


def test_layers_of_several_pages_share_blocks() -> None:
    found = layout("google/gemma-4-31B-it", "0.22.0")
    # 50 windowed layers with 16 heads of 256, 10 full ones with 4 of 512, whose blocks are twice as long.
    assert (found.pools, len(found.groups)) == (10, 6)
    assert {(group.kind, group.block_size) for group in found.groups} == {("window", 16), ("full", 32)}


def test_longest_context_is_where_one_request_fits() -> None:
    found = layout("llama-3.1-8b", "0.19.0")
    room = 100 * found.block_bytes
    assert found.find_longest(room, 10_000) == 1600
    assert found.find_longest(room, 800) == 800
    assert found.find_longest(0, 800) == 0


def test_a_window_holds_what_is_in_flight() -> None:
    earlier, later = layout("google/gemma-3-12b-it", "0.25.0"), layout("google/gemma-3-12b-it", "0.26.0")
    window = next(group for group in earlier.groups if group.kind == "window")
    assert earlier._count_group_blocks(window, 100_000) == -(-(1023 + 2048) // 16) + 1
    assert later._count_group_blocks(window, 100_000) == -(-(1023 + 4096) // 16) + 1


def test_groups_are_padded_where_kinds_are_similar() -> None:
    # Of gpt-oss-20b half of 24 layers have a window.
    assert {layout("gpt-oss-20b", release).pools for release in ("0.11.0", "0.16.0", "0.19.0")} == {12}
