"""Lookup of a model by the name that the user gave: catalog, hub, local configuration, or the user's own factory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memprof.allocator.messages import MpsOutOfMemoryError
from memprof.errors import MemprofError, UsageError, error_text, first_line, nearest, suggest_name
from memprof.spec import DTYPES, OWN_ATTENTIONS, TargetSpec
from memprof.workload import attention
from memprof.workload.catalog import ModelEntry, find_model, has_model, list_models, read_config_file, resolve_size
from memprof.workload.custom_code import check_trusted, find_code_reference, forbid_exit, load_classes
from memprof.workload.formats import WeightFormat, check_use, checkpoint_format, requested_format

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model that the user named, with a function that builds it.
    `build` raises UsageError if the configuration is not valid, or the factory fails or returns no module."""

    name: str
    # causal-lm, masked-lm, seq2seq-lm, image-classification, speech-seq2seq, custom, or other (fed what forward takes).
    task: str
    build: Callable[[], nn.Module]  # builds the module on the default device, in the dtype of `dtype`
    dtype: str | None  # the dtype that it will have; None: the factory's
    max_positions: int | None
    vocab_size: int | None
    config: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()  # what was assumed in choosing it
    asked_vocab_size: int | None = None  # the vocabulary that the user requested, if any: a larger one is a finding
    stored: WeightFormat | None = None  # how its weights are stored, if they are quantized
    # Imports the model's code, as `build` does otherwise: ten times as slowly under a profiler that records stacks.
    import_code: Callable[[], object] = lambda: None


def find_source(spec: TargetSpec) -> ModelSource:
    """Return the source of `spec.model`; raise UsageError if there is no such model, or `spec` does not suit it."""
    source = _make_source(spec)
    if spec.new_tokens is not None and source.task != "causal-lm":
        raise UsageError(
            "--new-tokens is for causal language models",
            value=f"{source.name} ({source.task})",
            hint="leave it out: one forward is run",
        )
    return source


def find_source_without_imports(spec: TargetSpec) -> ModelSource | None:
    """Return `find_source(spec)`, or None if that would import the user's code, or ask the hub for a configuration.
    Raises UsageError as `find_source`, and also if the file of the user's code does not exist."""
    if not spec.model_is_size and not has_model(spec.model):
        target, factory = _split_factory(spec)
        if factory:
            _check_file(target)
            return None
        if _is_hub_id(spec.model):
            return None
    return find_source(spec)


def _make_source(spec: TargetSpec) -> ModelSource:
    if spec.model_is_size:
        return _make_catalog_source(resolve_size(spec.model), spec)
    name = spec.model
    if has_model(name):
        return _make_catalog_source(find_model(name), spec)
    target, factory = _split_factory(spec)
    if factory:
        return _make_factory_source(target, factory, spec)
    if name.endswith(".py"):
        raise UsageError("a Python file needs the name of a factory", value=name, hint=f"write {name}:build_model")
    if _is_hub_id(name):
        return _make_hub_source(name, spec)
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".json"):
        return _make_folder_source(path, spec)
    names = [*(entry.key for entry in list_models()), *(entry.hf_id for entry in list_models())]
    hint = suggest_name(name, names) or "`memprof models` lists the catalog"
    raise UsageError(
        "unknown model", value=repr(name), hint=f"{hint} (an org/name id, a folder or file.py:factory work too)"
    )


def _split_factory(spec: TargetSpec) -> tuple[str, str]:
    """Return file (or module) and function of a model of the user's own; two empty texts for any other model."""
    target, separator, factory = spec.model.rpartition(":")
    if not separator or not factory.isidentifier():
        return "", ""
    if spec.quantize is not None:
        raise UsageError(
            "--quantize is for models of transformers", value=spec.model, hint="let the factory build quantized layers"
        )
    return target, factory


def _is_hub_id(name: str) -> bool:
    """Return whether `name`, which is not in the catalog, may be a model of the hub: it is not the path of a file."""
    is_file = Path(name).expanduser().exists() or name.endswith((".json", ".py"))
    return "/" in name and not name.startswith(("/", ".")) and not is_file


def _make_catalog_source(entry: ModelEntry, spec: TargetSpec) -> ModelSource:
    config = entry.load_config()
    dtype, reasons = choose_dtype(entry.checkpoint_dtype, spec)
    name, hub_id = (entry.key, "") if spec.model_is_size else entry.resolve_alias(spec.model)
    notes = [
        entry.note if entry.synthesized else f"Model: {hub_id or entry.hf_id} as {entry.architecture}.",
        *reasons,
    ]
    classes = functools.partial(_import_classes, entry.architecture, str(config.get("model_type")))
    return _make_transformers_source(name, classes, entry.architecture, entry.task, config, dtype, notes, spec)


def _make_folder_source(path: Path, spec: TargetSpec) -> ModelSource:
    file, config = read_config_file(path)
    for key, expected_type in _ENTRY_TYPES.items():
        value = config.get(key)
        if value is not None and not (
            isinstance(value, expected_type) and (expected_type is dict or all(isinstance(item, str) for item in value))
        ):
            raise UsageError("the configuration is wrong", value=f"{file}: {key} is {value!r}", hint="mend that entry")
    folder = file.resolve().parent
    return _make_configuration_source(folder.name, _add_defaults(config), spec, origin=str(folder))


_ENTRY_TYPES = {"architectures": list, "quantization_config": dict, "auto_map": dict}
# The names that model types have for their number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
# What memprof reads of a configuration beside the positions; where it is left out, the type's default holds.
_DEFAULTS = ("vocab_size", "relative_attention_num_buckets")


def _add_defaults(config: dict[str, Any]) -> dict[str, Any]:
    missing_keys = [key for key in _DEFAULTS if key not in config]
    if not any(key in config for key in _POSITIONS):  # one is another's alias, with the default in both
        missing_keys += _POSITIONS
    if not missing_keys:
        return config
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(config["model_type"])
    except ValueError:  # a type that this release does not know, which is said where the class is looked for
        return config
    default_values = {key: getattr(defaults, key, None) for key in missing_keys}
    return {**{key: value for key, value in default_values.items() if isinstance(value, int)}, **config}


def _make_hub_source(name: str, spec: TargetSpec) -> ModelSource:
    from transformers import PretrainedConfig

    try:
        # Without a network the hub's client retries for half a minute, so only its cache is used then. AutoConfig is
        # not used, because it would ask at the terminal whether to run a model's own code.
        config, _ = PretrainedConfig.get_config_dict(name, local_files_only=not _is_hub_reachable())
        if not isinstance(config.get("model_type"), str):
            raise ValueError("its config.json has no model_type")
    except (OSError, ValueError, KeyError) as error:
        closest = nearest(name, [entry.hf_id for entry in list_models()])
        suggestion = f"did you mean {closest!r}, which is in the catalog? Or " if closest else ""
        raise UsageError(
            "the configuration could not be had from the model hub",
            value=f"{name} ({type(error).__name__}: {first_line(error)[:120]})",
            hint=f"{suggestion}check the name and the network, or download its config.json and give its path",
        ) from None
    return _make_configuration_source(name, _add_defaults(config), spec, origin=name)


def _is_hub_reachable() -> bool:
    """Return whether the host name of the model hub resolves; True behind a proxy, where names need not resolve."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


_TASK_OF_SUFFIX = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSpeechSeq2Seq": "speech-seq2seq",
    "ForImageClassification": "image-classification",
}


def _make_configuration_source(name: str, config: dict[str, Any], spec: TargetSpec, *, origin: str) -> ModelSource:
    """Return the source of a model with this `config`; `origin` is the folder or hub repository of its own code."""
    _check_dtype(name, config, spec)
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None:  # of a class of its own, its name
        reference = find_code_reference(config, "")
        architecture = reference.rpartition(".")[2] if reference else _find_default_architecture(config["model_type"])
    if architecture == "WhisperForConditionalGeneration":
        task = "speech-seq2seq"
    elif architecture.endswith("ForConditionalGeneration"):
        task = "seq2seq-lm"
    elif not architecture.endswith(tuple(_TASK_OF_SUFFIX)):
        task = "other"
    else:
        task = next((t for suffix, t in _TASK_OF_SUFFIX.items() if architecture.endswith(suffix)), "causal-lm")
    stored = checkpoint_format(config, origin)
    dtype, reasons = choose_dtype(config.get("dtype") or config.get("torch_dtype") or "float32", spec, stored)
    notes = [f"Model: {name} as {architecture}.", *reasons]
    find_classes = functools.partial(_import_classes, architecture, str(config.get("model_type")))
    reference = find_code_reference(config, architecture)
    if reference is not None and (
        spec.trust_remote_code or not hasattr(importlib.import_module("transformers"), architecture)
    ):
        notes.append(check_trusted(reference, origin, trusted=spec.trust_remote_code))
        find_classes = functools.partial(load_classes, config, reference, origin, offline=not _is_hub_reachable())
    config = {key: value for key, value in config.items() if key != "auto_map"}
    return _make_transformers_source(name, find_classes, architecture, task, config, dtype, notes, spec, stored)


def _find_default_architecture(model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"):
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        if model_type in names:
            return str(names[model_type])
    raise UsageError("unknown model type in the configuration", value=repr(model_type), hint='add its "architectures"')


def _make_transformers_source(
    name: str,
    find_classes: Callable[[], tuple[Any, Any]],
    architecture: str,
    task: str,
    config: dict[str, Any],
    dtype: str,
    notes: list[str],
    spec: TargetSpec,
    checkpoint_weights: WeightFormat | None = None,
) -> ModelSource:
    """Return the source of a transformers model; `find_classes` returns (configuration class, model class)."""
    if checkpoint_weights is not None:
        check_use(checkpoint_weights, spec)
    stored = checkpoint_weights or requested_format(spec)
    notes += attention.check(spec, name, task, config)
    if spec.vocab_size is not None:
        if config.get("vocab_size") is None:  # speech encoders have null there until a tokenizer is known
            problem = "--vocab-size does not apply: the model has no vocabulary"
            raise UsageError(problem, value=name, hint="leave it out")
        notes.append(f"Vocabulary of {spec.vocab_size:,} instead of {config['vocab_size']:,}.")
        config = {**config, "vocab_size": spec.vocab_size}

    def build() -> nn.Module:
        import torch

        from memprof.workload.quantization import load_quantized

        config_class, model_class = find_classes()
        entries = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "architectures")}
        configuration = _make_configuration(config_class, entries)
        arguments: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        if spec.attention is not None:
            arguments["attn_implementation"] = spec.attention
        if spec.attention in OWN_ATTENTIONS:
            attention.register(spec.attention)
        try:
            if stored is not None:
                return load_quantized(model_class, configuration, arguments, stored, spec)
            model = model_class._from_config(configuration, **arguments)
        except (torch.OutOfMemoryError, MpsOutOfMemoryError, MemprofError):
            raise
        except Exception as error:  # of any class: each model makes of its entries what it likes
            raise UsageError(
                f"transformers cannot build {architecture} from this configuration",
                value=" ".join(error_text(error).split()),
                hint="check --attention and the configuration",
            ) from error
        if spec.attention in OWN_ATTENTIONS:
            attention.adapt(model, spec.attention)
        return model  # type: ignore[no-any-return]

    return ModelSource(
        name=name,
        task=task,
        build=build,
        dtype=dtype,
        max_positions=_find_max_positions(config),
        vocab_size=config.get("vocab_size"),
        config=config,
        notes=tuple(notes),
        asked_vocab_size=spec.vocab_size,
        stored=stored,
        import_code=find_classes,
    )


def _check_dtype(name: str, config: Mapping[str, Any], spec: TargetSpec) -> None:
    """Raise UsageError if the dtype in `config` is not supported, and `spec` requests no other dtype."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if spec.dtype is None and spec.amp is None and dtype not in DTYPES:
        raise UsageError(
            "the configuration has a dtype that no model is built in",
            value=f"{name}: dtype is {dtype!r}",
            hint=f"mend that entry, or give --dtype {'|'.join(DTYPES)}",
        )


def _import_classes(architecture: str, model_type: str) -> tuple[Any, Any]:
    import transformers

    # By its path first, for which transformers' names of all models need not be read.
    name = model_type.replace("-", "_")
    with contextlib.suppress(ImportError, AttributeError):
        model_class = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), architecture)
        return model_class.config_class, model_class
    try:
        model_class = getattr(transformers, architecture)
        return model_class.config_class, model_class
    except AttributeError:
        raise UsageError(
            "this transformers release does not have the model's class",
            value=f"{architecture} (transformers {transformers.__version__})",
            hint="update transformers, or give a file.py:factory",
        ) from None


def _make_configuration(config_class: Any, entries: dict[str, Any]) -> Any:
    arguments = {key: value for key, value in entries.items() if key not in ("model_type", "transformers_version")}
    try:
        return config_class(**arguments)
    except Exception as error:  # of any class: each model type checks its entries in its own way
        message = " ".join(line.strip() for line in error_text(error).splitlines() if line.strip())
        raise UsageError(
            "the configuration is not valid for its model type",
            value=message or type(error).__name__,
            hint="mend that entry of the config.json",
        ) from None


def _find_max_positions(config: Mapping[str, Any]) -> int | None:
    if "relative_attention_num_buckets" in config:
        return None  # T5: positions are relative, and n_positions binds nothing
    return next((config[key] for key in _POSITIONS if isinstance(config.get(key), int)), None)


def choose_dtype(checkpoint: str, spec: TargetSpec, stored: WeightFormat | None = None) -> tuple[str, list[str]]:
    """Return the dtype of a model whose published weights are in the dtype `checkpoint`, and notes on the choice."""
    if (stored.name if stored else spec.quantize) == "awq-int4" and spec.amp is None:
        return "float16", ["dtype float16: that of AWQ's kernels, to which transformers casts the model."]
    if spec.dtype is not None:
        return spec.dtype, []
    if spec.amp is not None:
        return "float32", ["dtype float32: the master weights of mixed precision."]
    if checkpoint == "float16":
        return "bfloat16", ["dtype bfloat16: the checkpoint is float16, which does not train without a scaler."]
    dtype = checkpoint if checkpoint in ("float32", "bfloat16") else "bfloat16"
    return dtype, [f"dtype {dtype}: that of the published checkpoint."]


def _make_factory_source(target: str, factory: str, spec: TargetSpec) -> ModelSource:
    module = _import_module(target)
    function = getattr(module, factory, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        closest = nearest(factory, names)
        hint = f"did you mean {closest!r}?" if closest else f"it has: {', '.join(names) or 'no function'}"
        raise UsageError("no such factory", value=f"{target}:{factory}", hint=hint)

    def build() -> nn.Module:
        from torch import nn

        arguments = {name: getattr(spec, name) for name in ("vocab_size", "context_length", "batch_size")}
        with contextlib.suppress(ValueError, TypeError):
            parameters = inspect.signature(function).parameters
            arguments = {key: value for key, value in arguments.items() if key in parameters and value is not None}
        try:
            with forbid_exit(f"the factory {factory}"):
                model = function(**arguments)
        except (MemprofError, KeyboardInterrupt):
            raise
        except BaseException as error:
            last_frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UsageError(
                f"the factory {factory} raised {type(error).__name__}",
                value=f"{first_line(error)} ({last_frame.filename}:{last_frame.lineno})",
                hint="mend it, or see the whole traceback with --debug",
            ) from error
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"the factory {factory} did not return a module", value=type(model).__name__, hint="return an nn.Module"
            )
        return model

    return ModelSource(
        name=f"{Path(target).name}:{factory}",
        task="custom",
        build=build,
        dtype=spec.dtype,
        max_positions=None,
        vocab_size=None,
        config=None,
        asked_vocab_size=spec.vocab_size,
    )


def _check_file(name: str) -> None:
    """Raise UsageError if `name` is that of a Python file that does not exist."""
    path = Path(name).expanduser()
    if name.endswith(".py") and not path.is_file():
        raise UsageError("no such file", value=path, hint="give the path of a Python file, then :factory")


def _import_module(name: str) -> ModuleType:
    """Import and return module `name`, or file `name` with its folder on sys.path; raise UsageError if that fails."""
    _check_file(name)
    path = Path(name).expanduser()
    is_file = name.endswith(".py")
    display_name = str(path) if is_file else name
    folder = str(path.resolve().parent) if is_file else ""
    sys.path.insert(0, folder)
    try:
        with forbid_exit(display_name):
            if not is_file:
                return importlib.import_module(name)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    except (MemprofError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(
            f"{display_name} cannot be imported",
            value=f"{type(error).__name__}: {first_line(error)}",
            hint="run it with python first; --debug shows the traceback",
        ) from error
    finally:
        with contextlib.suppress(ValueError):  # if the module has removed it itself
            sys.path.remove(folder)
