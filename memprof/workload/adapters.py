"""Adapters: small trained matrices added to a frozen model by PEFT."""

from __future__ import annotations

import contextlib
import fnmatch
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from memprof.errors import UsageError, first_line, not_installed
from memprof.spec import TargetSpec
from memprof.workload.models import ModelSource
from memprof.workload.packed_layers import KERNELS
from memprof.workload.quantization import import_quietly

ALL_LINEAR = "all-linear"  # PEFT's name for every linear layer except the head

_TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}


def require_peft() -> None:
    """Import PEFT, before operators are recorded; raise UsageError if PEFT is missing or incompatible."""
    try:
        import_quietly("peft")
    except ImportError as error:
        raise not_installed("--adapter needs PEFT", f"{type(error).__name__}: {first_line(error)}", "peft") from None


_TARGETS_EXAMPLE = f"--lora-targets q_proj,v_proj, or --lora-targets {ALL_LINEAR}"


def add_lora(model: nn.Module, spec: TargetSpec, source: ModelSource) -> nn.Module:
    """Return `model`, frozen and wrapped by PEFT, with LoRA matrices of rank `spec.lora_rank` on each target module.

    PEFT keeps the matrices in float32 when the model is in half precision (`autocast_adapter_dtype`, its default).
    lora_alpha is twice the rank, as is usual; it does not affect memory. A bitsandbytes model is first prepared by PEFT
    (parameters that are not quantized become float32), without its checkpointing: see `--activation-checkpointing`.

    Raises UsageError if PEFT does not know which modules to adapt, or no module has a given name.
    """
    import peft

    rank = spec.lora_rank
    assert rank is not None
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=spec.lora_dropout,
        target_modules=parse_target_modules(spec.lora_targets),
        task_type=_TASK_TYPES.get(source.task),
    )
    if source.stored is not None and source.stored.is_bitsandbytes:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    elif source.stored is not None:  # for packed layers PEFT finds its own where GPTQModel is installed
        from peft.tuners.lora.awq import AwqLoraLinear
        from peft.tuners.lora.gptq import GPTQLoraLinear

        adapter_classes: dict[str, Any] = {"gptq": GPTQLoraLinear, "awq": AwqLoraLinear}
        config._register_custom_module({layer: adapter_classes[method] for (method, _), layer in KERNELS.items()})
    with translate_peft_errors(_TARGETS_EXAMPLE):
        return peft.get_peft_model(model, config)


def check_targets(spec: TargetSpec, source: ModelSource) -> None:
    """Raise UsageError if `spec` names no target modules and PEFT has no default targets for the architecture."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS

    model_type = (source.config or {}).get("model_type")
    if spec.lora_targets is not None or model_type is None or model_type in PEFT_TARGETS:
        return
    import peft

    stub = nn.Module()
    stub.config = {"model_type": model_type}  # type: ignore[assignment]
    with translate_peft_errors(_TARGETS_EXAMPLE):
        peft.get_peft_model(stub, peft.LoraConfig())


def parse_target_modules(names: str | None) -> str | list[str] | None:
    """Return PEFT's `target_modules` for comma-separated `names`; None selects PEFT's default for the architecture."""
    if names is None:
        return None
    listed = [name.strip() for name in names.split(",")]
    return ALL_LINEAR if listed == [ALL_LINEAR] else listed


@contextlib.contextmanager
def translate_peft_errors(example: str) -> Iterator[None]:
    """Context manager: raise PEFT's ValueError or TypeError as UsageError; `example` shows the option that names
    modules."""
    try:
        with warnings.catch_warnings():
            # PEFT warns that GPT-2's weights are transposed, and handles that itself.
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError) as error:
        raise UsageError(
            "PEFT cannot adapt this model", value=first_line(error), hint=f"name the modules to adapt: {example}"
        ) from None


def match_parameters(model: nn.Module, patterns: str, problem: str) -> list[nn.Parameter]:
    """Return the parameters whose names match `patterns` (with commas).
    Raises UsageError with the message `problem` if a pattern matches no parameter."""
    parameters = dict(model.named_parameters())
    matching: dict[str, None] = {}
    for pattern in map(str.strip, patterns.split(",")):
        matches = fnmatch.filter(parameters, pattern)
        if not matches:
            examples = " and ".join(repr(name) for name in (*list(parameters)[:1], *list(parameters)[-1:]))
            raise UsageError(
                problem, value=repr(pattern), hint=f"the model's are named like {examples}; * stands for anything"
            )
        matching |= dict.fromkeys(matches)
    return [parameters[name] for name in matching]


def enable_input_gradients(model: nn.Module) -> None:
    """Make the output of the frozen embedding of `model` require a gradient, if transformers has not done so.
    Reentrant checkpointing (transformers' default before release 5) needs an input that requires a gradient."""
    enable = getattr(model, "enable_input_require_grads", None)
    if enable is not None and not getattr(model, "_require_grads_hooks", None):
        enable()
