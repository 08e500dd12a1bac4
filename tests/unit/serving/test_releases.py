"""Rules of vLLM by release."""

from __future__ import annotations

import pytest

from memprof.errors import UsageError
from memprof.serving.releases import FLASHINFER, SORT, TRITON, read_vllm_rules
from memprof.units import GIB


@pytest.mark.parametrize(
    ("release", "sampler", "copies"),
    [
        ("0.10.1.1", FLASHINFER, 2), ("0.11.0", SORT, 9), ("0.16.0", SORT, 9), ("0.17.0", TRITON, 3),
        ("0.20.2", TRITON, 3), ("0.21.0", FLASHINFER, 3), ("0.33.0", FLASHINFER, 3),
    ],
)  # fmt: skip
def test_samplers(release: str, sampler: str, copies: int) -> None:
    rules = read_vllm_rules(release)
    assert rules.find_sampler((8, 9)) == sampler
    assert rules.count_float32_logits(sampler) == copies


def test_flashinfer_needs_a_gpu_that_it_supports() -> None:
    assert [read_vllm_rules(release).find_sampler((7, 5)) for release in ("0.21.0", "0.25.0")] == [FLASHINFER, TRITON]


@pytest.mark.parametrize(
    ("family", "is_dense", "is_quantized", "first"),
    [
        ("qwen3", True, False, "0.22.0"), ("llama", True, False, "0.23.0"), ("llama", True, True, "0.24.0"),
        ("deepseek_v2", False, False, "0.24.0"), ("qwen2", True, True, "0.25.0"),
        ("qwen3_5_text", False, False, "0.29.0"),
    ],
)  # fmt: skip
def test_the_second_runner_became_the_default_by_architecture(
    family: str, is_dense: bool, is_quantized: bool, first: str
) -> None:
    releases = ("0.21.0", "0.22.0", "0.23.0", "0.24.0", "0.25.0", "0.28.0", "0.29.0")
    for release in releases:
        used = read_vllm_rules(release).uses_second_runner(family, is_dense=is_dense, is_quantized=is_quantized)
        assert used is (release >= first), release


def test_defaults_of_utilization() -> None:
    assert [read_vllm_rules(release).default_utilization for release in ("0.19.1", "0.20.0")] == [0.9, 0.92]


@pytest.mark.parametrize(
    ("release", "gib", "name", "limits"),
    [
        ("0.19.0", 79.1, "NVIDIA H100 80GB HBM3", (1024, 8192)),
        ("0.19.0", 79.1, "NVIDIA A100-SXM4-80GB", (256, 2048)),
        ("0.19.0", 23.5, "NVIDIA GeForce RTX 4090", (256, 2048)),
        ("0.19.0", 178.3, "NVIDIA B200", (1024, 8192)),
        ("0.28.0", 178.3, "NVIDIA B200", (1024, 16384)),
        ("0.33.0", 119.6, "NVIDIA GB10 (DGX Spark)", (256, 2048)),
    ],
)
def test_batch_limits(release: str, gib: float, name: str, limits: tuple[int, int]) -> None:
    assert read_vllm_rules(release).choose_batch_limits(int(gib * GIB), name) == limits


def test_releases_are_read() -> None:
    assert read_vllm_rules("0.19.2rc1.dev134+gfe9c3d6c5").release == (0, 19, 2)
    assert read_vllm_rules("v0.20").release == (0, 20, 0)
    assert read_vllm_rules(None) == read_vllm_rules("0.33.0")


def test_graphs_are_subtracted_where_they_are_estimated() -> None:
    releases = ("0.19.0", "0.20.0", "0.25.0", "0.28.0", "0.29.0")
    assert [read_vllm_rules(release).subtracts_graphs(is_second_runner=True) for release in releases] == [
        False, False, False, False, True
    ]  # fmt: skip
    assert [read_vllm_rules(release).subtracts_graphs(is_second_runner=False) for release in releases] == [
        False, True, True, True, True
    ]  # fmt: skip


@pytest.mark.parametrize(("release", "problem"), [("latest", "not a release"), ("0.7.3", "is not known here")])
def test_other_releases_are_refused(release: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_vllm_rules(release)
