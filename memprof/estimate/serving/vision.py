"""What vLLM keeps of images in its profile run: their pixels and the encoder's output, until the run ends.

It encodes as many of the largest images as fit the encoder's budget, max_num_batched_tokens or one image if that is
more (v1/worker/gpu_model_runner.py, profile_run; multimodal/encoder_budget.py, 0.19).
"""

from __future__ import annotations

from memprof.estimate.serving.model import ServedModel
from memprof.estimate.serving.weights import get_itemsize


def count_image_bytes(model: ServedModel, max_num_batched_tokens: int) -> int:
    """Return the bytes of pixels and of encoded images at the end of the run; 0: the model takes none, or its images
    are not known here."""
    shape = _find_largest_image(model)
    if shape is None:
        return 0
    tokens, pixels = shape
    count = max(max_num_batched_tokens // tokens, 1)
    return count * (tokens * model.geometry.hidden + pixels) * get_itemsize(model.dtype)


def _find_largest_image(model: ServedModel) -> tuple[int, int] | None:
    """Return tokens and pixel values of the largest image."""
    vision = model.config.get("vision_config")
    if not vision:
        return None
    size, patch = vision.get("image_size") or 0, vision.get("patch_size") or 14
    kind = model.config["model_type"]
    if kind == "gemma3":
        return model.config.get("mm_tokens_per_image") or 256, 3 * (size or 896) ** 2
    if kind == "mistral3":
        side = (size or 1540) // (patch * (model.config.get("spatial_merge_size") or 2))
        return side * (side + 1), 3 * (size or 1540) ** 2
    return None
