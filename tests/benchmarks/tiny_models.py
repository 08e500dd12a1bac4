"""Tiny configurations of transformers' architectures, and batches for them."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH_SIZE = 2


@dataclass(frozen=True)
class Case:
    task: str
    model_type: str
    class_name: str


_LAYERS = 2
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "decoder_hidden_size")
_INNER = (
    "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
    "hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
    "dim_ff", "dff", "feed_forward_size", "mlp_dim", "intermediate_size_mlp", "shared_intermediate_size",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_num_attention_heads",
    "decoder_num_attention_heads",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "encoder_num_key_value_heads",
             "decoder_num_key_value_heads")  # fmt: skip
_DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_blocks",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Ways to shrink, tried in this order; every one of them cuts the depth as well.
_SIZES: dict[str, dict[str, int]] = {
    "small": {
        **dict.fromkeys(_WIDTHS, 64), **dict.fromkeys(_INNER, 128), **dict.fromkeys(_HEADS, 4),
        **dict.fromkeys(_KV_HEADS, 2), **dict.fromkeys(_EXPERTS, 8), "head_dim": 16, "global_head_dim": 16,
        "vocab_size": 512, "attention_head_size": 16, "d_kv": 16, "kv_channels": 16,
        "rotary_dim": 16, "expand": 1, "n_groups": 1, "entity_vocab_size": 64, "entity_emb_size": 16,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 512, "d_latents": 64, "num_latents": 16, "qk_channels": 64, "v_channels": 64,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "width": {
        **dict.fromkeys(_WIDTHS, 64), **dict.fromkeys(_INNER, 128), **dict.fromkeys(_HEADS, 4),
        **dict.fromkeys(_KV_HEADS, 4), "vocab_size": 512,
    },
    "experts": {**dict.fromkeys(_EXPERTS, 8), "vocab_size": 512},
    "wide": {
        **dict.fromkeys(_WIDTHS, 256), **dict.fromkeys(_INNER, 256), **dict.fromkeys(_EXPERTS, 16), "vocab_size": 512,
    },
    "vocabulary": {"vocab_size": 512},
    "depth": {},
}  # fmt: skip


# Fields without which some models cannot be built, and that their default configurations leave at None.
_FILLED: dict[str, Any] = {
    "head_dim": 16, "num_experts_per_tok": 2, "n_routed_experts": 8, "num_experts": 8, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1,
    "num_local_experts": 8, "first_k_dense_replace": 1, "vocab_size": 512, "pad_token_id": 0, "rope_theta": 10000.0,
    "default_language": "en_XX", "num_key_value_heads": 4, "decoder_num_key_value_heads": 4,
    "moe_intermediate_size": 64,
}  # fmt: skip


def _shrunk(config: Any, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """Arguments for a smaller configuration of the same class: only fields that it has, and its parts likewise."""
    changed: dict[str, Any] = {}
    parts = getattr(type(config), "sub_configs", {})
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for alias, target in getattr(config, "attribute_map", {}).items():
        if target in fields:
            fields.pop(alias, None)
    for name, value in fields.items():
        if name in parts and value is not None:
            inner = _shrunk(value, sizes, layers)
            changed[name] = type(value)(**inner)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            if name in sizes and value > sizes[name]:
                changed[name] = sizes[name]
            elif name in _DEPTHS and value > layers:
                changed[name] = layers
            elif sizes.get("vocab_size") and value >= sizes["vocab_size"] and _is_token(name):
                changed[name] = 1 + len(changed) % 8
        elif name == "depths" and isinstance(value, (list, tuple)):
            changed[name] = type(value)(1 for _ in value)
    return changed


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_token_idx"))


def _layer_lists(config: Any, layers: int) -> dict[str, Any]:
    """Per-layer lists cut to the new depth, keeping one of each kind where they fit."""
    cut: dict[str, Any] = {}
    depth = next((getattr(config, name) for name in _DEPTHS if isinstance(getattr(config, name, None), int)), None)
    for name, value in vars(config).items():
        if isinstance(value, list) and depth and len(value) == depth and depth > layers:
            kinds = list(dict.fromkeys(map(str, value)))
            chosen = [next(v for v in value if str(v) == kind) for kind in kinds][:layers]
            cut[name] = (chosen * layers)[:layers]
    return cut


def configurations(case: Case) -> Iterator[tuple[str, Any]]:
    """Tiny configurations, likeliest first; those that transformers refuses to make are left out."""
    config_class = CONFIG_MAPPING[case.model_type]
    default = config_class()
    seen: set[str] = set()
    for (name, sizes), layers in itertools.product(_SIZES.items(), (_LAYERS, 4)):
        for variant in ("plain", "lists", "filled"):
            arguments = _shrunk(default, sizes, layers)
            if variant == "filled":
                for field, value in _FILLED.items():
                    if getattr(default, field, 0) is None:
                        arguments[field] = value
                if case.task == "causal-lm" and getattr(default, "is_decoder", None) is False:
                    arguments["is_decoder"] = True
            elif variant == "lists":
                lists = _layer_lists(default, layers)
                if not lists:
                    continue
                arguments.update(lists)
            try:
                config = config_class(**copy.deepcopy(arguments))
            except Exception:
                continue
            _give_tokens(config)
            if variant == "filled" and getattr(config, "layer_types", 0) is None:
                config.layer_types = ["full_attention"] * config.num_hidden_layers
            text = config.to_json_string(use_diff=False)
            if text not in seen:
                seen.add(text)
                yield f"{name}, {layers} layers", config
    _give_tokens(default)
    yield "default", default


def _give_tokens(config: Any) -> None:
    """A tokenizer's numbers, which a decoder needs and default configurations leave out."""
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


# -- batches ----------------------------------------------------------------------------------------------------------


def _text_config(config: Any) -> Any:
    with contextlib.suppress(Exception):
        return config.get_text_config(decoder=True)
    return config


def _vocabulary(config: Any) -> int:
    for holder in (_text_config(config), config):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 128


def _find(config: Any, names: Sequence[str], default: int) -> Any:
    holders = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))]
    for holder, name in itertools.product(holders, names):
        value = getattr(holder, name, None)
        if isinstance(value, (int, list, tuple)):
            return value
    return default


def _ids(config: Any, length: int) -> torch.Tensor:
    vocabulary = _vocabulary(config)
    return torch.randint(min(20, vocabulary - 1), vocabulary, (BATCH_SIZE, length))


def batches(case: Case, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Batches that such a model may take, likeliest first."""
    config: Any = model.config
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    if case.task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        longest = getattr(config, "max_position_embeddings", None)
        lengths = [32, 128, 15, 1, math.prod(getattr(config, "axial_pos_shape", (64,)))]
        for length in lengths + [longest] * (isinstance(longest, int) and longest <= 2048):
            ids = _ids(config, length)
            key = "inputs" if "inputs" in names and "input_ids" not in names else "input_ids"
            batch = {key: ids}
            if "labels" in names:
                batch["labels"] = ids.clone()
            yield batch
            if "attention_mask" in names:
                yield {**batch, "attention_mask": torch.ones_like(ids)}
        return
    if case.task == "image-classification":
        size = _find(config, ("image_size",), 64)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = _find(config, ("num_channels", "in_channels"), 3)
        key = "inputs" if "pixel_values" not in names else "pixel_values"
        labels = {"labels": torch.zeros(BATCH_SIZE, dtype=torch.int64)} if "labels" in names else {}
        for side in ((height, width), (224, 224)):
            yield {key: torch.randn(BATCH_SIZE, channels, *side), **labels}
        patch = _find(config, ("patch_size",), 16)
        flat = torch.randn(BATCH_SIZE, 16, channels * patch * patch)
        shapes = torch.full((BATCH_SIZE, 2), 4)
        masks = torch.ones(BATCH_SIZE, 16, dtype=torch.int64)
        yield {key: flat, "spatial_shapes": shapes, "pixel_attention_mask": masks, **labels}
        yield {"input_ids" if "input_ids" in names else key: _ids(config, 64), **labels}
        return
    bins = _find(config, ("num_mel_bins", "input_feat_per_channel", "feature_size", "num_features", "input_dim",
                          "feature_projection_input_dim"), 80)  # fmt: skip
    frames = _find(config, ("max_source_positions",), 128)
    vocabulary = _vocabulary(config)
    text = torch.randint(min(20, vocabulary - 1), vocabulary, (BATCH_SIZE, 12))
    labels = {"labels": text} if "labels" in names else {}
    audio = [
        torch.randn(BATCH_SIZE, bins, 2 * frames),
        torch.randn(BATCH_SIZE, 128, bins),
        torch.randn(BATCH_SIZE, bins, 128),
    ]
    waves = [torch.randn(BATCH_SIZE, 8000), torch.randn(BATCH_SIZE, 1, 8000)]
    extra: dict[str, torch.Tensor] = {}
    if "decoder_input_ids" in names and "labels" not in names:
        extra["decoder_input_ids"] = text
    inputs = waves if main == "input_values" else audio if main == "input_features" else [*audio, *waves]
    key = main if main in names else "input_features" if "input_features" in names else "input_values"
    if key in names and main != "input_ids":
        for data in inputs:
            yield {key: data, **labels, **extra}
            length = data.shape[1] if data.dim() == 2 or data.shape[1] == 128 else data.shape[-1]
            if "attention_mask" in names:
                yield {key: data, **labels, **extra, "attention_mask": torch.ones(BATCH_SIZE, length).long()}
    elif "input_ids" in names:
        ids = _ids(config, 32)
        yield {"input_ids": ids, **({"labels": ids.clone()} if "labels" in names else {})}
