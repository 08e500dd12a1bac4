"""Image encoders of small configurations: `kimi_vl` by hand, parameters of others as transformers 5.23 makes them."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.estimate.serving.vision import ImageEncoder, read_image_encoder

SIZES = {"hidden_size": 32, "intermediate_size": 80}
SIGLIP = {**SIZES, "num_hidden_layers": 3, "image_size": 56, "patch_size": 14}
QWEN = {**SIZES, "depth": 3, "patch_size": 16, "num_position_embeddings": 64}
WIDTH = 48  # of the decoder


def read(kind: str, vision: dict[str, Any] | None, **config: Any) -> ImageEncoder | None:
    return read_image_encoder({"model_type": kind, "vision_config": vision, **config}, WIDTH)


@pytest.mark.parametrize(
    ("kind", "vision", "config", "encoder"),
    [
        ("gemma3", SIGLIP, {"mm_tokens_per_image": 4}, ImageEncoder(32, 80, 3, 16, 4, 3 * 56**2, 49_744)),
        # An image and ten tiles.
        ("llava_next", SIGLIP, {}, ImageEncoder(32, 80, 3, 11 * 16, 11 * 16, 11 * 3 * 56**2, 52_160)),
        # 2 x 2 merged patches, and a token after each row.
        ("mistral3", SIGLIP, {"spatial_merge_size": 2}, ImageEncoder(32, 80, 3, 16, 6, 3 * 56**2, 62_336, True)),
        (
            "qwen2_vl", {"embed_dim": 32, "hidden_size": WIDTH, "depth": 3, "patch_size": 14}, {},
            ImageEncoder(32, 128, 3, 65536, 16384, 65536 * 3 * 2 * 14**2, 98_512, max_video_frames=7),
        ),
        (
            "qwen2_5_vl", {**SIZES, "depth": 3, "patch_size": 14}, {},
            ImageEncoder(32, 80, 3, 65536, 16384, 65536 * 3 * 2 * 14**2, 96_848, True, max_video_frames=7),
        ),
        ("qwen3_5", QWEN, {}, ImageEncoder(32, 80, 3, 65536, 16384, 65536 * 3 * 2 * 16**2, 102_752)),
        (
            "qwen3_vl", {**QWEN, "deepstack_visual_indexes": [0]}, {},
            ImageEncoder(32, 80, 3, 65536, 16384, 65536 * 3 * 2 * 16**2, 125_712),
        ),
        (
            "kimi_vl", SIGLIP, {},
            ImageEncoder(
                32, 80, 3, 4096, 1024, 4096 * 3 * 14**2,
                3 * (4 * 32 * 32 + 2 * 32 * 80 + 80 + 9 * 32) + (588 + 4096) * 32 + 128 * 128 + 128 * WIDTH,
            ),
        ),
        # 32 frames of 630 patches and 78 tokens; one head.
        (
            "gemma4", {**SIZES, "num_hidden_layers": 3, "patch_size": 16}, {},
            ImageEncoder(32, 80, 3, 32 * 630, 32 * 78, 32 * 630 * 3 * 16**2, 717_376, True, 630),
        ),
    ],
)  # fmt: skip
def test_encoders_of_small_models(
    kind: str, vision: dict[str, Any], config: dict[str, Any], encoder: ImageEncoder
) -> None:
    assert read(kind, vision, **config) == encoder


@pytest.mark.parametrize(
    ("kind", "patches", "tokens", "side"),
    [
        ("gemma3", 64**2, 256, 896), ("llava_next", 11 * 24**2, 11 * 24**2, 336),
        ("mistral3", 110**2, 55 * 56, 1540),
    ],
)  # fmt: skip
def test_sizes_that_a_configuration_leaves_out(kind: str, patches: int, tokens: int, side: int) -> None:
    found = read(kind, {"hidden_size": 32, "num_hidden_layers": 1})
    images = 11 if kind == "llava_next" else 1
    assert found is not None and found.intermediate == 4 * 32
    assert (found.patches, found.tokens, found.pixels) == (patches, tokens, images * 3 * side**2)


@pytest.mark.parametrize(
    ("kind", "vision"),
    [("gemma3", None), ("gemma3", {}), ("gemma3", {"hidden_size": 32}), ("gemma3", {"depth": 3}), ("blip", SIGLIP)],
)
def test_what_has_no_encoder_that_is_known(kind: str, vision: dict[str, Any] | None) -> None:
    assert read(kind, vision) is None


def test_bytes_of_a_profile_run() -> None:
    """Nine tokens are two images of four."""
    encoder = read("gemma3", SIGLIP, mm_tokens_per_image=4)
    assert encoder is not None and [encoder.count_images(tokens) for tokens in (3, 7, 8, 9)] == [1, 1, 2, 2]
    assert encoder.count_kept_bytes(9, WIDTH, 2) == 2 * (4 * WIDTH + 3 * 56**2) * 2
    assert encoder.count_layer_bytes(9, 2, 1 << 30, batches=True) == 2 * 16 * (2 * 80 + 4 * 32) * 2
    # Of Gemma 4, as many frames at once as a tenth of the GPU is enough for, and at least one.
    video = read("gemma4", {**SIZES, "num_hidden_layers": 3})
    assert video is not None
    frame, width = 630 * 4 * 10240 * 8, 3 * 80 + 4 * 32
    for total, frames in ((10 * frame - 10, 1), (20 * frame - 1, 1), (20 * frame, 2), (400 * frame, 32)):
        assert video.count_layer_bytes(9, 2, total, batches=True) == frames * 630 * width * 2
