"""Which blocks of a quantized checkpoint keep their dtype: by lists in its config.json, or as its kind is published.

Sources of the lists' meaning: compressed_tensors/utils/match.py (names, and patterns after "re:"); ModelOpt's
exclude_modules (wildcards); transformers' modules_to_not_convert (parts of names).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from memprof.errors import UsageError

# One matrix of each block, by the names that models give it.
_MATRICES = {
    "attention": ("self_attn.o_proj",),
    "state": ("linear_attn.out_proj", "mixer.out_proj", "mamba.out_proj"),
    "mlp": ("mlp.down_proj", "feed_forward.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    "shared expert": ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
}
BLOCKS = tuple(_MATRICES)
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers")
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")


def list_published_exceptions(name: str, ending: str, *, has_experts: bool) -> list[str]:
    """Return the modules that a checkpoint of this name and ending leaves as they are, as others that were read do.

    Linear attention by llm-compressor (examples/quantization_w8a8_fp8/qwen3_next_example.py and qwen3_5_moe.py of
    vllm-project/llm-compressor), and NVIDIA's NVFP4 of experts the attention (hf_quant_config.json of
    nvidia/DeepSeek-R1-0528-NVFP4, nvidia/GLM-4.7-NVFP4 and nvidia/MiniMax-M2.5-NVFP4).
    """
    is_compressed = ending in (
        "-nvfp4",
        "-fp4",
        "-fp8-dynamic",
        "-quantized.w8a8",
        "-w8a8",
        "-quantized.w4a16",
        "-w4a16",
    )
    exceptions = ["re:.*linear_attn.*"] if is_compressed else []
    if has_experts and name.lower().startswith("nvidia/") and ending in ("-nvfp4", "-fp4"):
        exceptions.append("re:.*self_attn.*")
    return exceptions


def compute_kept_shares(entry: Mapping[str, Any] | None, num_layers: int) -> dict[str, float]:
    """Return the share of the layers in which a block keeps its dtype, by the block's name; blocks that are quantized
    in all layers are left out. Raises UsageError: a list of the configuration is none."""
    names = [(key, name) for key in _LISTS for name in _read_names(entry or {}, key)]
    plain = {name for _, name in names if not name.startswith("re:") and "*" not in name}  # hundreds in some lists
    patterns = [_compile(name, key) for key, name in names if name not in plain]
    shares = {}
    for block, matrices in _MATRICES.items():
        kept = 0
        for layer in range(num_layers) if names else ():
            modules = [f"{prefix}.{layer}.{matrix}" for prefix in _PREFIXES for matrix in matrices]
            kept += any(
                not plain.isdisjoint(_list_parts(module)) or any(pattern.match(module) for pattern in patterns)
                for module in modules
            )
        if kept:
            shares[block] = kept / num_layers
    return shares


def _list_parts(module: str) -> list[str]:
    """Return the parts of a module's path between dots, of one name and of several: a name in a list means any."""
    path = module.split(".")
    return [".".join(path[i:j]) for i in range(len(path)) for j in range(i + 1, len(path) + 1)]


def _read_names(entry: Mapping[str, Any], key: str) -> list[str]:
    names = entry.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            "the configuration is wrong", value=f"quantization_config.{key}", hint="make it a list of names"
        )
    return names


def _compile(name: str, key: str) -> re.Pattern[str]:
    """Return the pattern of the modules that a name of a list means: after "re:" a regular expression for its start,
    else a name with wildcards."""
    if name.startswith("re:"):
        try:
            return re.compile(name[3:])
        except re.error as error:
            problem = f"a pattern of the configuration is wrong: {error}"
            raise UsageError(problem, value=name, hint=f"correct quantization_config.{key}") from None
    return re.compile(fnmatch.translate(name))
