"""Published models: their configurations and exact sizes, so that memprof can build them without a network.

`data/index.toml` has one table per model and `data/<key>.json` the configuration that
`transformers.AutoConfig.for_model` takes. Both hold facts (geometry and the flags that change the architecture or the
memory), each with the address where it was published. Nothing is read before the first call.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, unknown_name

LIST_HINT = "('memprof models' lists them; a Hugging Face id or a local config.json also works)"

# Entries of a configuration that are positive whole numbers in every model type, or one for each stage.
SIZE_KEYS = (
    *("hidden_size", "d_model", "n_embd", "intermediate_size", "d_ff", "vocab_size"),
    *("num_hidden_layers", "num_layers", "n_layer", "num_attention_heads", "num_heads", "n_head"),
    *("num_key_value_heads", "head_dim", "ffn_dim", "n_inner", "max_position_embeddings", "n_positions"),
)
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000  # far above any model; each layer is built, and a typing error must not take hours


# `compare=False`: a mapping is not hashable, and the other fields tell two entries apart.
@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the catalog, or a Llama-shaped model that `sizes.synthesize` made for a parameter count."""

    key: str  # the name within memprof, such as "llama-3.1-8b".
    hf_id: str  # the Hugging Face repository; empty for a synthesised model.
    architecture: str  # the class in transformers that `num_parameters` counts, such as "LlamaForCausalLM".
    task: str  # causal-lm, masked-lm, seq2seq-lm, image-classification or speech-seq2seq.
    num_parameters: int  # sum of `p.numel()` over `model.parameters()` of that class, so tied weights count once.
    checkpoint_dtype: str  # the dtype of the published weights, such as "bfloat16".
    # the longest sequence in tokens (image patches for a vision model, decoder tokens for a speech model); None if the
    # architecture has no limit.
    max_positions: int | None
    vocab_size: int | None  # rows of the token embedding; None for a model without tokens.
    sources: tuple[str, ...]  # addresses that the facts came from.
    family: str = ""  # what `memprof models` groups it under, such as "Qwen"; empty for a synthesised model.
    aliases: tuple[str, ...] = ()  # other names that `find_model` accepts.
    # the count that the publisher gives, if known. `note` says why it differs from `num_parameters`, where it does.
    published_parameters: int | None = None
    published_source: str = ""  # where that count stands.
    note: str = ""  # what to know about the entry; empty if nothing.
    synthesized: bool = False  # True for a model that nobody published.
    # the configuration of a synthesised model; None for one that is read from its file.
    config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def resolve_alias(self, name: str) -> tuple[str, str]:
        """Return the name to display for `name`, which is the model's key, id or alias, and its Hugging Face id.
        An alias may have an id of its own, with the same architecture and sizes, such as "llama-3.3-70b"."""
        folded_name, hf_ids = _fold_name(name), (self.hf_id, *(alias for alias in self.aliases if "/" in alias))
        exact = (hf_id for hf_id in hf_ids if folded_name == _fold_name(hf_id))
        similar = (hf_id for hf_id in hf_ids if _fold_name(hf_id.rpartition("/")[2]).startswith(folded_name))
        return (self.key if folded_name == _fold_name(self.key) else name), next(iter((*exact, *similar)), self.hf_id)

    def load_config(self) -> dict[str, Any]:
        """Return a new dict with the configuration, for `AutoConfig.for_model(config.pop("model_type"), **config)`."""
        return copy.deepcopy(_read_config(self.key) if self.config is None else dict(self.config))


@cache
def list_models() -> tuple[ModelEntry, ...]:
    """Return all published models of the catalog, in the order of the index (by family, its newest first)."""
    import tomllib

    return tuple(_make_entry(key, table) for key, table in tomllib.loads(_read_text("index.toml")).items())


def find_model(name: str) -> ModelEntry:
    """Return the catalog's model with key, id or alias `name` (case, spaces, - and _ are ignored); raise UsageError if
    no model has that name."""
    entry = _index_by_folded_name().get(_fold_name(name))
    if entry is None:
        raise unknown_name("model", name, [entry.key for entry in list_models()], see=LIST_HINT)
    return entry


def read_config_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return path and parsed content of config.json; `path` is the file or its folder. Raises UsageError if invalid."""
    import json

    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError("no config.json here", value=path, hint="give a model folder or its config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("cannot read the configuration", value=file, hint=str(error).splitlines()[0]) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError("not a model configuration", value=file, hint='it has no "model_type"')
    _check_sizes(file, config)
    return file, config


def _check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """Raise UsageError if a value under SIZE_KEYS is not a positive integer (or list of them), or is too large."""
    for key in SIZE_KEYS:
        size = config.get(key)
        limit = MAX_LAYERS if "layer" in key else MAX_SIZE
        sizes = size if isinstance(size, list) and size else [size]
        if size is not None and not all(type(value) is int and 1 <= value <= limit for value in sizes):
            hint = f"make {key} a whole number from 1 to {limit:,}"
            raise UsageError("the configuration is wrong", value=f"{file}: {key} is {size!r}", hint=hint)


def has_model(name: str) -> bool:
    """Return whether the catalog has a model with key, id or alias `name`."""
    return _fold_name(name) in _index_by_folded_name()


def _read_text(name: str) -> str:
    # Imported here, as the parsers below: they take most of the time that importing this file would.
    from importlib import resources

    return resources.files("memprof.workload.catalog").joinpath("data", name).read_text(encoding="utf-8")


@cache
def _read_config(key: str) -> dict[str, Any]:
    """Return the cached configuration of the published model `key`; callers must not modify it."""
    import json

    config: dict[str, Any] = json.loads(_read_text(f"{key}.json"))
    return config


def _fold_name(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


def _make_entry(key: str, table: Mapping[str, Any]) -> ModelEntry:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return ModelEntry(key=key, **{"max_positions": None, "vocab_size": None, **fields})


@cache
def _index_by_folded_name() -> dict[str, ModelEntry]:
    # The organisation may be left out: "Qwen3-4B" for "Qwen/Qwen3-4B". The first model with a name keeps the name.
    return {
        _fold_name(name): entry
        for entry in reversed(list_models())
        for name in (entry.key, entry.hf_id, entry.hf_id.rpartition("/")[2], *entry.aliases)
    }
