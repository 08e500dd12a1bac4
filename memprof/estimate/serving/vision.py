"""Image encoders of multimodal models: their weights, and what vLLM's profile run has of images.

The profile run encodes as many of the largest images or videos as fit the encoder's budget, which is
max_num_batched_tokens, or one if that is more. Pixels and outputs stay allocated until the run ends
(v1/worker/gpu_model_runner.py, profile_run; multimodal/encoder_budget.py, 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_QWEN_MAX_TOKENS = 16384  # Of one image: max_pixels of the published processors, in merged patches.
# Pairs of frames of a video: 14 frames by vLLM's default, unless the processor bounds all of the video's pixels, as
# that of Qwen3-VL does (qwen2_vl.py, _MAX_FRAMES_PER_VIDEO; qwen3_vl.py, get_max_video_tokens).
_QWEN2_FRAME_PAIRS = 7
_LLAVA_TILES = 10  # Of the largest entry of image_grid_pinpoints in published configurations.
_GEMMA4_POSITIONS = 10240  # Rows of the position table in each direction (transformers, Gemma4VisionConfig).


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """An image encoder: the sizes of its layers, and the largest image."""

    hidden: int
    intermediate: int
    layers: int
    patches: int  # Of the largest image.
    tokens: int  # Of the largest image, as the decoder sees it.
    pixels: int  # Values of the largest image.
    num_parameters: int
    is_gated: bool = False
    frame_patches: int = 0  # Patches that the encoder takes at once, if it splits its input; 0: it takes all.
    max_video_frames: int = (
        1  # Of the largest video, if the context is long enough: each as large as the largest image.
    )

    def widen_to_video(self, context_length: int) -> ImageEncoder:
        """Return the encoder with the largest video of a context for its largest image, if that is larger: as many
        frames as the context has room for (vllm/model_executor/models/qwen2_vl.py of 0.33,
        get_num_frames_with_most_features)."""
        frames = max(min(context_length // self.tokens, self.max_video_frames), 1)
        larger = {name: getattr(self, name) * frames for name in ("patches", "tokens", "pixels")}
        return replace(self, **larger)

    def count_images(self, max_num_batched_tokens: int) -> int:
        """Return the images in the profile run."""
        return max(max_num_batched_tokens // self.tokens, 1)

    def count_kept_bytes(self, max_num_batched_tokens: int, hidden: int, itemsize: int) -> int:
        """Return the bytes of pixels and encoded images, for a decoder of width `hidden`."""
        return self.count_images(max_num_batched_tokens) * (self.tokens * hidden + self.pixels) * itemsize

    def count_layer_bytes(self, max_num_batched_tokens: int, itemsize: int, total_bytes: int, *, batches: bool) -> int:
        """Return the bytes of the encoder's widest layer: the MLP's projections, and four hidden states. An encoder
        that splits its input takes one frame at once, or with `batches` those for which a tenth of the GPU's
        `total_bytes` is enough (vllm/model_executor/models/gemma4_mm.py, _encoder_chunk)."""
        width = (3 if self.is_gated else 2) * self.intermediate + 4 * self.hidden
        patches = self.count_images(max_num_batched_tokens) * self.patches
        if self.frame_patches:
            frames = total_bytes // 10 // (self.frame_patches * 4 * _GEMMA4_POSITIONS * 8) if batches else 1
            patches = min(patches, max(frames, 1) * self.frame_patches)
        return patches * width * itemsize


def read_image_encoder(config: Mapping[str, Any], decoder_hidden: int) -> ImageEncoder | None:
    """Return the image encoder of a model's configuration; None: it has none, or one that is not known here."""
    vision, kind = config.get("vision_config"), str(config.get("model_type"))
    if not isinstance(vision, Mapping) or not vision:
        return None
    # In Qwen2-VL's, hidden_size is the decoder's width (transformers, Qwen2VLVisionConfig).
    hidden = vision.get("embed_dim") or vision.get("hidden_size") or 0
    layers = vision.get("num_hidden_layers") or vision.get("depth") or 0
    width, patch = vision.get("intermediate_size") or 4 * hidden, vision.get("patch_size") or 14
    if not hidden or not layers:
        return None
    attention = 4 * hidden * hidden
    if kind == "gemma3":  # SigLIP
        size = vision.get("image_size") or 896
        per_layer = attention + 2 * hidden * width + 9 * hidden + width
        rest = (3 * patch**2 + 1 + (size // patch) ** 2 + 3 + decoder_hidden) * hidden
        tokens = config.get("mm_tokens_per_image") or 256
        return ImageEncoder(hidden, width, layers, (size // patch) ** 2, tokens, 3 * size**2, layers * per_layer + rest)
    if kind == "llava_next":  # SigLIP or CLIP, on an image and its tiles
        size = vision.get("image_size") or 336
        patches, tiles = (size // patch) ** 2, 1 + _LLAVA_TILES
        per_layer = attention + 2 * hidden * width + 9 * hidden + width
        rest = (3 * patch**2 + patches + 3) * hidden + (hidden + decoder_hidden + 3) * decoder_hidden
        tokens, pixels = tiles * patches, tiles * 3 * size**2
        return ImageEncoder(hidden, width, layers, tiles * patches, tokens, pixels, layers * per_layer + rest)
    if kind == "mistral3":  # Pixtral, with a projector that merges 2 x 2 patches
        size, merge = vision.get("image_size") or 1540, config.get("spatial_merge_size") or 2
        side = size // patch
        per_layer = attention + 3 * hidden * width + 2 * hidden
        rest = 3 * patch**2 * hidden + 2 * hidden + merge**2 * hidden**2 + (hidden + decoder_hidden) * decoder_hidden
        merged = side // merge
        tokens = merged * (merged + 1)
        return ImageEncoder(hidden, width, layers, side**2, tokens, 3 * size**2, layers * per_layer + rest, True)
    if kind in _QWEN_TYPES:
        is_gated = kind == "qwen2_5_vl"  # its norms have no bias
        mlp = 3 * hidden * width + 2 * width if is_gated else 2 * hidden * width + width + 2 * hidden
        per_layer = attention + mlp + 7 * hidden
        values = 3 * 2 * patch**2  # Of a patch in two frames.
        merger = 16 * hidden**2 + 4 * hidden * (1 + decoder_hidden) + decoder_hidden
        # Qwen3-VL's decoder takes results of some layers, too, each through a merger with a wider norm.
        num_deep = len(vision.get("deepstack_visual_indexes") or ())
        positions = (vision.get("num_position_embeddings") or 0) * hidden
        rest = positions + hidden * (values + (1 if is_gated else 2) + (1 if positions else 0))  # the patches' bias
        count = layers * per_layer + rest + merger + num_deep * (merger + 8 * hidden)
        patches = 4 * _QWEN_MAX_TOKENS
        frames = _QWEN2_FRAME_PAIRS if kind in ("qwen2_vl", "qwen2_5_vl") else 1
        return ImageEncoder(
            hidden, width, layers, patches, _QWEN_MAX_TOKENS, patches * values, count, is_gated, max_video_frames=frames
        )
    if kind == "kimi_vl":  # MoonViT: at most 4,096 patches, merged 2 x 2
        per_layer = attention + 2 * hidden * width + 9 * hidden + width
        merger = 16 * hidden**2 + 4 * hidden * decoder_hidden
        count = layers * per_layer + (3 * patch**2 + 64 * 64) * hidden + merger
        return ImageEncoder(hidden, width, layers, 4096, 1024, 4096 * 3 * patch**2, count)
    if kind == "gemma4":
        per_layer = attention + 3 * hidden * width + 6 * hidden
        patch = vision.get("patch_size") or 16
        count = layers * per_layer + (3 * patch**2 + 2 * _GEMMA4_POSITIONS + decoder_hidden) * hidden
        # The largest input is a video of 32 frames, each 70 tokens of 3 x 3 patches and 8 around them, in 0.19 to 0.33
        # (vllm/model_executor/models/gemma4_mm.py, get_mm_max_tokens_per_item).
        frame, tokens = 9 * 70, 32 * 78
        pixels = 32 * frame * 3 * patch**2
        return ImageEncoder(hidden, width, layers, 32 * frame, tokens, pixels, count, True, frame_patches=frame)
    return None
