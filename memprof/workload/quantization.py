"""Quantized weights, by bitsandbytes as transformers' `from_pretrained` loads them, and the libraries it takes."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch
from torch import nn

from memprof.errors import first_line, not_installed
from memprof.spec import TargetSpec


def require(module: str) -> Any:
    """`module` of a library for quantized numbers, imported; to be called before a virtual GPU is there to watch.

    Raises:
        UsageError: the package is not installed, or does not go with this torch.
    """
    try:
        return import_quietly(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise not_installed(
            f"{package} is needed", f"{type(error).__name__}: {first_line(error)}", "quantization"
        ) from None


def import_quietly(module: str) -> Any:
    """`module`, imported without notices: they speak of kernels that a machine without a card lacks.

    Raises:
        ImportError: it is not installed, or does not go with this torch.
    """
    loggers = [logging.getLogger(name) for name in (module.partition(".")[0], "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def load_quantized(model_class: Any, configuration: Any, arguments: dict[str, Any], spec: TargetSpec) -> nn.Module:
    """A model of transformers on "cuda", its linear layers but the head quantized while they are loaded.

    transformers does it: `from_pretrained` with a `BitsAndBytesConfig` and a checkpoint in host memory, one weight
    after the other (transformers/core_model_loading.py; quantizing as it loads, it uses no threads).

    `arguments` are `dtype` and, if asked for, `attn_implementation`.
    """
    import transformers

    checkpoint = model_class._from_config(configuration, **arguments)
    state = _as_saved(checkpoint)
    del checkpoint
    model: nn.Module = model_class.from_pretrained(
        None,
        config=configuration,
        state_dict=state,
        quantization_config=_configuration(transformers, spec, arguments["dtype"]),
        device_map={"": "cuda:0"},
        **arguments,
    )
    return model


def count_parameters(model: nn.Module) -> int:
    """The numbers that a model's parameters stand for; bitsandbytes packs two weights of 4 bits into an element."""
    states = ((parameter, getattr(parameter, "quant_state", None)) for parameter in model.parameters())
    return sum(parameter.numel() if state is None else state.shape.numel() for parameter, state in states)


def assumptions(spec: TargetSpec) -> list[str]:
    """What `load_quantized` and what follows it take for given, in sentences."""
    if spec.quantize is None:
        return []
    found = [f"Weights are loaded as transformers' from_pretrained does with BitsAndBytesConfig ({spec.quantize}"]
    if spec.quantize == "int8":
        found[0] += ", threshold 6.0)."
        found.append(
            "LLM.int8 finds no outliers in the activations; each outlier column would be kept in half precision."
        )
    else:
        double = "with" if spec.double_quant else "without"
        found[0] += f", {double} double quantization, computing in the model's dtype)."
    if spec.adapter is not None:
        found.append(
            "PEFT's prepare_model_for_kbit_training casts what is not quantized to float32, the head included."
        )
    return found


def _configuration(transformers: Any, spec: TargetSpec, dtype: torch.dtype) -> Any:
    if spec.quantize == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=spec.quantize,
        bnb_4bit_use_double_quant=spec.double_quant,
        bnb_4bit_compute_dtype=dtype if spec.amp is None else getattr(torch, spec.amp),
    )


def _as_saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of `model` as a checkpoint has it: tied weights once."""
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state
