"""Find a model to serve: by its name in memprof's catalog or in models.toml, by its size, or by its config.json."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from memprof.errors import unknown_name
from memprof.estimate.serving.model import ServedModel, build_served_model
from memprof.workload.catalog import find_model, has_model, list_models, read_config_file, resolve_size

_HINT = "('memprof models' lists more; a folder with config.json also works)"
# Endings of names whose weights have the architecture of the name without them.
_TUNED_ENDINGS = ("-instruct", "-it", "-chat")


def load_served_model(name: str, *, is_size: bool = False) -> ServedModel:
    """Return the model with this name, of this size such as "8B", or of this configuration file or folder.

    An instruct model that is listed nowhere has the shape of its base model. Raises UsageError: there is no such model,
    or the closed form does not know its architecture.
    """
    if is_size:
        entry = resolve_size(name)
        return build_served_model(entry.load_config(), entry.key, entry.hf_id or entry.key)
    listed = _index_by_folded_name().get(name.lower().rpartition("/")[2])
    if listed is not None:
        return build_served_model(_load_listed_config(listed), name, listed)
    for candidate in (name, _strip_ending(name)):
        if has_model(candidate):
            entry = find_model(candidate)
            shown, hf_id = entry.resolve_alias(candidate)
            is_exact = candidate == name and entry.task == "causal-lm" and not entry.synthesized
            model = build_served_model(entry.load_config(), shown, hf_id if candidate == name else name)
            return replace(model, num_parameters=entry.num_parameters if is_exact else None)
    path = Path(name).expanduser()
    if not (path.exists() or name.endswith(".json")):
        raise unknown_name("model", name, [*(entry.key for entry in list_models()), *_read_models()], see=_HINT)
    file, config = read_config_file(path)
    return build_served_model(config, file.resolve().parent.name, str(file.parent))


def _strip_ending(name: str) -> str:
    folded = name.lower()
    return next((name[: -len(ending)] for ending in _TUNED_ENDINGS if folded.endswith(ending)), name)


@cache
def _read_models() -> dict[str, dict[str, Any]]:
    import tomllib
    from importlib import resources

    text = resources.files("memprof.estimate.serving").joinpath("models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _index_by_folded_name() -> dict[str, str]:
    return {name.rpartition("/")[2].lower(): name for name in _read_models()}


def _load_listed_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model of models.toml, with the entries of its base."""
    table: Mapping[str, Any] = _read_models()[name]
    if "config" in table:
        config: dict[str, Any] = copy.deepcopy(table["config"])
    else:
        base = str(table["base"])
        config = _load_listed_config(base) if base in _read_models() else find_model(base).load_config()
    text = config.get("text_config", config)
    text.update(table.get("text", {}))
    return config
