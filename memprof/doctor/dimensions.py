"""The dimensions of a model's tensors, from the model's configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from memprof.errors import UsageError
from memprof.workload.catalog import ModelEntry, find_model, has_model, list_models


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model; 0 or None for dimensions that the model lacks."""

    model: str  # Key in the catalog, or path of the configuration.
    vocabulary: int = 0  # Rows of the token embedding.
    hidden: int = 0  # Width of the residual stream.
    intermediate: int = 0  # Width of a feed-forward layer.
    heads: int = 0  # Query heads.
    kv_heads: int = 0  # Key and value heads.
    head_dim: int = 0  # Width of a head.
    num_experts: int = 0  # Experts of a layer.
    expert_width: int = 0
    max_positions: int | None = None  # Tokens of the longest sequence.
    num_parameters: int = 0  # 0: unknown.
    half_dtype: str = "bfloat16"  # Half-precision dtype of the checkpoint, or the default.


def _read_int(config: Mapping[str, Any], *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)


def get_dimensions(entry: ModelEntry) -> Dimensions:
    """Return the dimensions of a model of the catalog."""
    return replace(
        _read_dimensions(entry.key, entry.load_config(), entry.checkpoint_dtype),
        vocabulary=entry.vocab_size or 0,
        max_positions=entry.max_positions,
        num_parameters=entry.num_parameters,
    )


def find_dimensions(name: str) -> Dimensions:
    """Return the dimensions of the model with this catalog name, or in the config.json at this path or in this folder.
    Raises UsageError: the catalog has no such model, or the file is no configuration."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if has_model(name) or not path.is_file():
        return get_dimensions(find_model(name))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last: nested without end
        config = None
    if not isinstance(config, dict):
        raise UsageError("not a model's configuration", value=name, hint="a config.json, as transformers writes it")
    text_config = config.get("text_config")
    config = {**config, **text_config} if isinstance(text_config, dict) else config
    return _read_dimensions(name, config, config.get("dtype") or config.get("torch_dtype"))


def _read_dimensions(name: str, config: Mapping[str, Any], dtype: str | None) -> Dimensions:
    hidden = _read_int(config, "hidden_size", "n_embd", "d_model", "dim")
    heads = _read_int(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    is_multi_query = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    intermediate = _read_int(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim")
    return Dimensions(
        model=name,
        vocabulary=_read_int(config, "vocab_size"),
        hidden=hidden,
        intermediate=intermediate or 4 * hidden,
        heads=heads,
        kv_heads=1 if is_multi_query else _read_int(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_read_int(config, "head_dim", "d_kv") or (hidden // heads if heads else 0),
        num_experts=_read_int(config, "num_experts", "num_local_experts", "n_routed_experts"),
        expert_width=_read_int(config, "moe_intermediate_size", "intermediate_size"),
        max_positions=_read_int(config, "max_position_embeddings", "n_positions") or None,
        half_dtype="float16" if dtype == "float16" else "bfloat16",
    )


@cache
def list_catalog_dimensions() -> tuple[Dimensions, ...]:
    """Return the dimensions of all models of the catalog."""
    return tuple(map(get_dimensions, list_models()))


_MODEL_PATTERNS = (
    re.compile(r"""(?:model(?:_name(?:_or_path)?|_path|_id)?|base_model|hf_model)['"]?\s*[=: ]\s*['"]?([\w./@+-]+)"""),
    re.compile(r"""(?:from_pretrained\(|vllm serve |AutoModel\w*\()\s*['"]?([\w./@+-]+)"""),
    re.compile(
        r"""\b((?:meta-llama|Qwen|mistralai|google|openai|microsoft|EleutherAI|facebook|openai-community|allenai|deepseek-ai|HuggingFaceTB|tiiuae|bigscience)/[\w.-]+)"""
    ),
)
_NAME_SUFFIX = re.compile(
    r"[-_](?:instruct|chat|base|it|hf|pt|v\d[\d.]*|\d{4}|gguf|awq|gptq\S*|int[48]|fp8|4bit|bnb\S*|unsloth\S*)$", re.I
)


def find_model_name(text: str) -> str | None:
    """Return the catalog key of the model that a log's `text` mentions; None if it mentions none."""
    for pattern in _MODEL_PATTERNS:
        for match in pattern.finditer(text):
            name = match[1].rstrip("/.,'\"")
            for candidate in (name, name.rsplit("/", 1)[-1].replace("Meta-", "")):
                for _ in range(4):
                    if candidate and has_model(candidate):
                        return find_model(candidate).key
                    candidate = _NAME_SUFFIX.sub("", candidate)
    return None


_BATCH_SIZE_PATTERN = re.compile(
    r"(?:per_device_train_batch_size|micro_batch_size|train_micro_batch_size_per_gpu|--batch[_-]size)['\"]?[ =:]+(\d+)"
)
_LENGTH_PATTERN = re.compile(
    r"(?:max_seq_len(?:gth)?|cutoff_len|model_max_length|max_length|seq_len(?:gth)?|context_length|block_size)"
    r"['\"]?[ =:]+(\d+)"
)


def find_batch_size(text: str) -> int | None:
    """Return the batch size that options in a log's `text` set; None if not found."""
    return _find_int(_BATCH_SIZE_PATTERN, text, range(1, 1 << 20))


def find_seq_length(text: str) -> int | None:
    """Return the sequence length that options in a log's `text` set; None if not found."""
    return _find_int(_LENGTH_PATTERN, text, range(2, 1 << 24))


def _find_int(pattern: re.Pattern[str], text: str, allowed_range: range) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match and int(match[1]) in allowed_range else None
