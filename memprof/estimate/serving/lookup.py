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
from memprof.estimate.serving.unquantized import list_published_exceptions
from memprof.workload.catalog import find_model, has_model, list_models, read_config_file, resolve_size

_HINT = "('memprof models' lists more; a folder with config.json also works)"
# Endings of names whose weights have the architecture of the name without them.
_TUNED_ENDINGS = ("-instruct", "-it", "-chat", "-base", "-pt", "-instruct-2507", "-thinking-2507", "-hf")
# Endings of the names of quantized checkpoints, and the format in find_weight_format.
_QUANTIZED_ENDINGS = {
    "-fp8-dynamic": "fp8", "-fp8": "fp8", "-quantized.w8a8": "int8", "-w8a8": "int8", "-quantized.w4a16": "gptq",
    "-w4a16": "gptq", "-awq": "awq", "-awq-int4": "awq", "-awq-4bit": "awq", "-gptq": "gptq", "-gptq-int4": "gptq",
    "-gptq-int8": "gptq8", "-nvfp4": "nvfp4", "-fp4": "nvfp4", "-bnb-4bit": "bitsandbytes",
}  # fmt: skip

# Formats in which models of the catalog are published, whose configurations there are of unquantized weights.
_PUBLISHED_FORMATS = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "deepseek-v3": "fp8-block"}


def load_served_model(name: str, *, is_size: bool = False) -> ServedModel:
    """Return the model with this name, of this size such as "8B", or of this configuration file or folder.

    A checkpoint that is listed nowhere has the shape of the model that its name without endings such as -Instruct or
    -AWQ names. Raises UsageError: there is no such model, or the closed form does not know its architecture.
    """
    if is_size:
        entry = resolve_size(name)
        return build_served_model(entry.load_config(), entry.key, entry.hf_id or entry.key)
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".json"):
        file, config = read_config_file(path)
        return build_served_model(config, file.resolve().parent.name, str(file.parent))
    plain_name, ending = _split_quantization(name)
    found = _find_config(plain_name)
    if found is None:
        raise unknown_name("model", name, [*(entry.key for entry in list_models()), *_read_models()], see=_HINT)
    config, shown, hf_id, num_parameters = found
    if plain_name != name:
        kept = list_published_exceptions(
            name, ending, has_experts=build_served_model(config, shown, hf_id).experts is not None
        )
        quantization = {"quant_method": _QUANTIZED_ENDINGS[ending], "ignore": kept}
        config, shown, hf_id = {**config, "quantization_config": quantization}, name, name
    return replace(build_served_model(config, shown, hf_id), num_parameters=num_parameters)


def _split_quantization(name: str) -> tuple[str, str]:
    """Return a name without the ending of a quantized checkpoint, and that ending in lower case; "": it has none."""
    folded = name.lower()
    for ending in sorted(_QUANTIZED_ENDINGS, key=len, reverse=True):
        if folded.endswith(ending) and not has_model(name):
            return name[: -len(ending)], ending
    return name, ""


def _find_config(name: str) -> tuple[dict[str, Any], str, str, int | None] | None:
    """Return configuration, displayed name, repository and exact number of parameters; None: no such model."""
    listed = _index_by_folded_name().get(name.lower().rpartition("/")[2])
    if listed is not None:
        return _load_listed_config(listed), name, listed, None
    folded = name.lower()
    # A base model has the shape of the tuned one that is listed.
    stem = _index_by_folded_name(is_stem=True).get(_strip_tuned_ending(folded.rpartition("/")[2]))
    if stem is not None and "text_config" in _load_listed_config(
        stem
    ):  # served with its encoders; the catalog has none
        return _load_listed_config(stem), name, name, None
    endings = sorted((ending for ending in _TUNED_ENDINGS if folded.endswith(ending)), key=len, reverse=True)
    bases = [name, *(name[: -len(ending)] for ending in endings)]
    for base in bases:
        for candidate in (base, base.rpartition("/")[2], base.rpartition("/")[2].removeprefix("Meta-")):
            if has_model(candidate):
                entry = find_model(candidate)
                shown, hf_id = entry.resolve_alias(candidate)
                is_exact = candidate == name and entry.task == "causal-lm" and not entry.synthesized
                config = _load_catalog_config(entry.key)
                if candidate == name:
                    return config, shown, hf_id, entry.num_parameters if is_exact else None
                return config, name, name, None
    return None if stem is None else (_load_listed_config(stem), name, name, None)


def _strip_tuned_ending(folded: str) -> str:
    """Return a name in lower case without the longest of the endings of tuned models."""
    ending = max((ending for ending in _TUNED_ENDINGS if folded.endswith(ending)), key=len, default="")
    return folded.removesuffix(ending)


@cache
def _read_models() -> dict[str, dict[str, Any]]:
    import tomllib
    from importlib import resources

    text = resources.files("memprof.estimate.serving").joinpath("models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _index_by_folded_name(*, is_stem: bool = False) -> dict[str, str]:
    names = {name.rpartition("/")[2].lower(): name for name in _read_models()}
    return {_strip_tuned_ending(folded): name for folded, name in names.items()} if is_stem else names


def _load_catalog_config(key: str) -> dict[str, Any]:
    """Return the configuration of a model of the catalog, with the format in which it is published."""
    config = find_model(key).load_config()
    if key in _PUBLISHED_FORMATS:
        config["quantization_config"] = {"quant_method": _PUBLISHED_FORMATS[key]}
    return config


def _load_listed_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model of models.toml, with the entries of its base."""
    table: Mapping[str, Any] = _read_models()[name]
    if "config" in table:
        config: dict[str, Any] = copy.deepcopy(table["config"])
    else:
        base = str(table["base"])
        config = _load_listed_config(base) if base in _read_models() else _load_catalog_config(base)
    text = config.get("text_config", config)
    text.update(table.get("text", {}))
    return config
