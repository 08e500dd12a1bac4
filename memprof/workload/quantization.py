"""Models with quantized weights, loaded as by transformers' `from_pretrained`, and imports of the libraries needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from memprof.errors import first_line, not_installed
from memprof.patching import PatchSet
from memprof.spec import TargetSpec
from memprof.workload import stored_weights
from memprof.workload.formats import WeightFormat


def import_required(module: str) -> Any:
    """Import and return `module`, before operators are recorded; raise UsageError if missing or incompatible."""
    try:
        return import_quietly(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise not_installed(f"{package} is needed", f"{type(error).__name__}: {first_line(error)}", package) from None


def import_quietly(module: str) -> Any:
    """Import and return `module` without warnings, such as those on a missing GPU.

    Functions given to torch.compile during the import are compiled at their first call. Raises ImportError if the
    module is not installed, or incompatible with this torch.
    """
    loggers = [logging.getLogger(name) for name in (module.partition(".")[0], module, "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), _delay_compilation():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _delay_compilation() -> Iterator[None]:
    """Context manager: make torch.compile set up its compiler only when the compiled function is first called.

    bitsandbytes compiles its CPU kernels when imported (backends/default/ops.py), and a GPU never calls them. The
    decorator alone imports Dynamo and Inductor, which is a third of the time of a profile with an adapter.
    """
    compiler = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compiler(model, **options)
        compiled: Any = None

        @functools.wraps(model)
        def call_compiled(*arguments: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = compiler(model, **options)
            return compiled(*arguments, **kwargs)

        return call_compiled

    with PatchSet() as patches:
        patches.set(torch, "compile", compile_later)
        yield


def load_quantized(
    model_class: Any, configuration: Any, arguments: dict[str, Any], stored: WeightFormat, spec: TargetSpec
) -> nn.Module:
    """Return a `model_class` on "cuda", loaded by transformers with weights in the format `stored`.

    For bitsandbytes, `from_pretrained` with a `BitsAndBytesConfig` quantizes a checkpoint in host memory, one weight
    after the other (transformers/core_model_loading.py, which uses no threads while it quantizes).

    `arguments` are `dtype` and optionally `attn_implementation`. Raises UsageError if the format does not apply.
    """
    import transformers

    configuration.__dict__.pop("quantization_config", None)
    if not stored.is_bitsandbytes:
        return stored_weights.load_stored(model_class, configuration, arguments, stored, spec)

    config = dict(stored.config)
    if not stored.from_checkpoint and stored.name != "int8":
        config["bnb_4bit_compute_dtype"] = arguments["dtype"] if spec.amp is None else getattr(torch, spec.amp)
    state = _make_checkpoint_state(model_class._from_config(configuration, **arguments))
    model: nn.Module = model_class.from_pretrained(
        None,
        config=configuration,
        state_dict=state,
        quantization_config=transformers.BitsAndBytesConfig.from_dict(config),
        device_map={"": "cuda:0"},
        **arguments,
    )
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of `model` as if unquantized: a packed element counts as all that it holds."""
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        parameters = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, parameters))
        num_weights = stored_weights.count_weights(module)
        if num_weights is not None:
            total += num_weights if parameters else 0
            continue
        states = ((parameter, getattr(parameter, "quant_state", None)) for parameter in parameters)
        total += sum(parameter.numel() if state is None else state.shape.numel() for parameter, state in states)
    return total


def list_assumptions(stored: WeightFormat | None, spec: TargetSpec) -> list[str]:
    """Return sentences for the report on what `load_quantized` assumes; none if `stored` is None."""
    if stored is None:
        return []
    if not stored.is_bitsandbytes:
        return stored_weights.list_assumptions(stored, spec)
    sentences = [f"Weights are loaded as transformers' from_pretrained does with BitsAndBytesConfig ({stored.name}"]
    if stored.name == "int8":
        sentences[0] += f", threshold {float(stored.config.get('llm_int8_threshold', 6))})."
        sentences.append(
            "LLM.int8 finds no outliers in the activations; each outlier column would be kept in half precision."
        )
    else:
        with_or_without = "with" if stored.config.get("bnb_4bit_use_double_quant") else "without"
        dtype_source = "in the configuration's dtype" if stored.from_checkpoint else "in the model's dtype"
        sentences[0] += f", {with_or_without} double quantization, computing {dtype_source})."
    if spec.adapter is not None:
        sentences.append(
            "PEFT's prepare_model_for_kbit_training casts what is not quantized to float32, the head included."
        )
    return sentences


def list_unpacking_notes(stored: WeightFormat | None, model: nn.Module) -> list[str]:
    """Return a note for the report if transformers unpacked the weights of `model` while loading it, else nothing."""
    if stored is None or stored.is_bitsandbytes:
        return []
    if any(stored_weights.count_weights(module) is not None for module in model.modules()):
        return []
    return [
        f"transformers unpacked the {stored.name} weights while it loaded them: on this GPU, or of this model type."
    ]


def _make_checkpoint_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of `model` as in a checkpoint, with tied weights under one name."""
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state
