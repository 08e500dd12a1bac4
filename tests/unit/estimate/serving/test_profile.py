"""The peak of vLLM's profile run, by hand and beside published logs."""

from __future__ import annotations

import pytest

from memprof.device.catalog import find_gpu
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.model import build_served_model
from memprof.estimate.serving.profile import ProfilePeak, ProfileSettings, _list_moments, compute_profile_peak
from memprof.estimate.serving.weights import WeightFormat
from memprof.serving.releases import read_vllm_rules
from memprof.units import GIB, MIB
from tests.unit.estimate.serving.test_weights import LATENT, LLAMA, NEMOTRON


def peak(
    name: str, release: str, gpu: str = "h100-80gb", ranks: int = 1, seqs: int = 1024, tokens: int = 8192
) -> ProfilePeak:
    settings = ProfileSettings(read_vllm_rules(release), find_gpu(gpu), ranks, seqs, tokens, 8192)
    return compute_profile_peak(load_served_model(name), settings)


def test_the_sampler_by_hand() -> None:
    logits = 1024 * 128256 * (2 + 3 * 4)
    buffer, states, workspace = 132 * 128256 * 4, (8192 + 2 * 1024) * 4096 * 2, 32 * MIB
    found = peak("llama-3.1-8b", "0.19.0")
    assert found.num_bytes == logits + buffer + states + workspace
    assert "1,024 rows x 128,256 tokens x 14 bytes" in found.reason


def test_experts_keep_their_workspaces() -> None:
    # Two experts of 14,336 on two ranks: the first product has 14,336 columns, the activation 7,168.
    workspaces = 8192 * 2 * (14336 + 7168) * 2
    sampler = 1024 * 32000 * 14 + 132 * 32000 * 4 + (8192 + 2048) * 4096 * 2
    assert peak("mixtral-8x7b", "0.19.0", ranks=2).num_bytes == workspaces + sampler + 32 * MIB


def test_a_small_batch_peaks_in_the_mlp() -> None:
    found = peak("granite-3.1-8b-instruct", "0.19.0")
    assert found.num_bytes == 8192 * 3 * 12800 * 2 + 4 * 8192 * 4096 * 2 + 32 * MIB
    assert found.reason.startswith("MLP of 8,192 tokens")


@pytest.mark.parametrize(
    ("name", "release", "ranks", "gib"),
    [
        ("qwen2.5-7b", "0.19.0", 1, 2.21), ("gemma-2-27b", "0.19.0", 1, 3.66), ("phi-2", "0.19.0", 1, 0.79),
        ("qwen3-30b-a3b", "0.19.0", 1, 2.68), ("DeepSeek-V2-Lite-Chat", "0.19.0", 1, 1.93),
        ("gemma-3-27b-it", "0.19.0", 1, 3.99), ("qwen3-14b", "0.16.0", 1, 5.64), ("gpt-oss-20b", "0.11.0", 1, 7.38),
        ("llama-3.1-70b", "0.11.0", 2, 4.84),
    ],
)  # fmt: skip
def test_peaks_of_published_logs(name: str, release: str, ranks: int, gib: float) -> None:
    assert peak(name, release, ranks=ranks).num_bytes / GIB == pytest.approx(gib, abs=0.015)


def test_the_second_runner_does_not_profile_top_p() -> None:
    first, second = peak("llama-3.1-8b", "0.22.0"), peak("llama-3.1-8b", "0.23.0")
    assert first.num_bytes > second.num_bytes
    assert peak("qwen3-30b-a3b", "0.24.0").num_bytes == peak("qwen3-30b-a3b", "0.25.0").num_bytes
    assert peak("llama-3.1-8b", "0.33.0").num_bytes > peak("llama-3.1-8b", "0.32.0").num_bytes


def test_images_may_have_the_peak() -> None:
    found = peak("google/gemma-3-27b-it", "0.22.0", gpu="rtx-5090", seqs=256, tokens=4096)
    # 16 images of 4,096 patches.
    assert found.reason == "image encoder: 16 images of 4,096 patches"
    assert found.num_bytes / GIB == pytest.approx(1.72, abs=0.01)


def test_videos_of_gemma_are_encoded_in_parts() -> None:
    # Three videos of 32 frames with 630 patches; a tenth of the GPU is enough for 49 frames at once.
    found = peak("google/gemma-4-31B-it", "0.23.0", "rtx-pro-6000", seqs=20)
    assert found.reason == "MLP of 8,192 tokens x 64,512 elements; 3 images"
    encoder = load_served_model("google/gemma-4-31B-it").images
    assert encoder is not None
    width = 3 * 4304 + 4 * 1152
    total = find_gpu("rtx-pro-6000").total_bytes
    assert encoder.count_layer_bytes(8192, 2, total, batches=True) == 49 * 630 * width * 2
    assert encoder.count_layer_bytes(8192, 2, total, batches=False) == 630 * width * 2


@pytest.mark.parametrize(("context_length", "pairs"), [(8192, 1), (32767, 1), (32768, 2), (131072, 7), (10**6, 7)])
def test_a_video_has_as_many_frames_as_the_context(context_length: int, pairs: int) -> None:
    encoder = load_served_model("Qwen/Qwen2.5-VL-7B-Instruct").images
    assert encoder is not None
    assert encoder.widen_to_video(context_length).patches == pairs * 65536
    assert encoder.widen_to_video(context_length).count_images(8192) == 1


def test_a_processor_that_bounds_a_video_has_none_larger_than_an_image() -> None:
    encoder = load_served_model("Qwen/Qwen3.5-4B").images
    assert encoder is not None and encoder.widen_to_video(10**6) == encoder


STATES = 4 * 1000 * 48 * 2  # of 1,000 tokens, 48 wide
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "release", "ranks", "moments"),
    [
        # Attention and experts: the MLP of 96 has no gate, and the experts' workspaces are kept.
        (
            NEMOTRON | {"hybrid_override_pattern": "M*-M"}, "0.19.0", 1,
            {"MLP of 1,000 tokens x 192": 1000 * 2 * 96 * 2 + STATES,
             "2 experts": 3 * 1000 * 40 * 2 + STATES,
             "linear attention": 3 * 1000 * (96 + 32) * 2 + STATES},
        ),
        # Before 0.13 workspaces come and go: outputs of 48 or 20 columns, and half of the latter.
        (
            NEMOTRON | {"hybrid_override_pattern": "M*EE"}, "0.11.0", 2,
            {"MLP of 1,000 tokens x 96": 1000 * 2 * 48 * 2 + STATES,
             "2 experts": 2000 * (48 + 10 // 2) * 2 + 3 * 1000 * 40 // 2 * 2 + STATES,
             "linear attention": 3 * 1000 * (96 + 32) // 2 * 2 + STATES},
        ),
        # Every layer has experts of 512, gated.
        (
            MIXTRAL, "0.11.0", 1,
            {"2 experts": 2000 * (1024 + 512) * 2 + 4 * 1000 * 256 * 2},
        ),
        (MIXTRAL, "0.19.0", 1, {"2 experts": 4 * 1000 * 256 * 2}),
        # Eight times the context of 100, at least 256 for each of 10 requests, decompressed to 8 heads of 16 + 24.
        (
            LATENT, "0.19.0", 2,
            {"MLP of 1,000 tokens x 768": 1000 * 768 * 2 + 4 * 1000 * 256 * 2,
             "keys and values of 2,560": 2560 * 4 * 40 * 2 + 4 * 1000 * 256 * 2},
        ),
    ],
)  # fmt: skip
def test_moments_by_hand(config: dict[str, object], release: str, ranks: int, moments: dict[str, int]) -> None:
    settings = ProfileSettings(read_vllm_rules(release), find_gpu("a100-80gb"), ranks, 10, 1000, 100)
    _, *found = _list_moments(build_served_model(config, "tiny"), settings)
    assert [num_bytes for num_bytes, _ in found] == list(moments.values())
    assert all(reason.startswith(words) for words, (_, reason) in zip(moments, found, strict=True))


@pytest.mark.parametrize(("length", "seqs", "rows"), [(400, 10, 3200), (100, 10, 2560), (10_000, 10, 65536)])
def test_rows_of_latent_attention_that_are_decompressed(length: int, seqs: int, rows: int) -> None:
    settings = ProfileSettings(read_vllm_rules("0.19.0"), find_gpu("a100-80gb"), 1, seqs, 1000, length)
    *_, (num_bytes, reason) = _list_moments(build_served_model(LATENT, "tiny"), settings)
    assert num_bytes == rows * 8 * 40 * 2 + 4 * 1000 * 256 * 2 and f"{rows:,} tokens" in reason


def test_eager_mode_keeps_fewer_states_and_8_bits_the_activations() -> None:
    model, rules = build_served_model(LLAMA, "tiny"), read_vllm_rules("0.19.0")
    eager = ProfileSettings(rules, find_gpu("a100-80gb"), 1, 10, 1000, 100, is_eager=True)
    _, (num_bytes, _) = _list_moments(model, eager)
    assert num_bytes == 1000 * 3 * 512 * 2 + 2 * 1000 * 256 * 2
    for name in ("fp8", "fp8-block", "int8", "awq"):
        quantized = ProfileSettings(rules, find_gpu("a100-80gb"), 1, 10, 1000, 100, WeightFormat(name, 1.0))
        _, (num_bytes, _) = _list_moments(model, quantized)
        assert num_bytes == 1000 * 3 * 512 * 2 + (name != "awq") * 1000 * 512 + 4 * 1000 * 256 * 2
