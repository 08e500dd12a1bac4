"""Attention kinds that transformers does not have, installed into its causal language models: `--attention`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from memprof.errors import UsageError
from memprof.spec import OWN_ATTENTIONS, Mode, TargetSpec

_FLEX_KINDS = ("sliding", "block-sparse")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_NOTES = {
    "nsa": "Attention: native sparse attention, whose projections of keys and values are three times the model's; on "
    "the virtual GPU its three attentions allocate as fused kernels do.",
    "nsa-eager": "Attention: native sparse attention with every score in memory.",
    "sliding": "Attention: each query sees a window of keys, by flex_attention.",
    "block-sparse": "Attention: each query sees its 8 nearest blocks of 128 keys, the first and every eighth, by "
    "flex_attention.",
    "linear": "Attention: linear, with the feature map elu + 1, in chunks of 128 tokens.",
}


def check(spec: TargetSpec, name: str, task: str, config: Mapping[str, Any]) -> list[str]:
    """Return notes on the attention kind of `spec` for the report; raise UsageError if the model `name`, with this
    `task` and `config`, cannot use it."""
    kind = spec.attention
    if kind not in OWN_ATTENTIONS:
        return []
    if task != "causal-lm":
        raise UsageError(f"--attention {kind} is for causal language models", value=name, hint="leave it out")
    if kind in _FLEX_KINDS and spec.mode is Mode.TRAIN and spec.device == "cpu":
        hint = "leave out --device, or add --mode inference"
        raise UsageError("flex_attention has no backward on a CPU", value=f"--attention {kind}", hint=hint)
    dropout = next((key for key in _DROPOUTS if config.get(key)), None)
    if dropout is not None and spec.mode is Mode.TRAIN:
        raise UsageError(
            f"--attention {kind} has no dropout", value=f"{dropout} = {config[dropout]} of {name}",
            hint="give a config.json with 0, or a model that trains without, such as llama-3.2-1b",
        )  # fmt: skip
    if config.get("attn_logit_softcapping") is not None:
        raise UsageError(f"--attention {kind} caps no scores", value=f"attn_logit_softcapping of {name}")
    if kind.startswith("nsa") and (spec.quantize is not None or "quantization_config" in config):
        problem = "native sparse attention has projections of its own, which no quantized checkpoint has"
        raise UsageError(problem, value=name, hint="leave out --quantize")
    return [_NOTES[kind]]


def register(kind: str) -> None:
    """Register the attention `kind` with transformers, as a value of `attn_implementation`."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from memprof.workload.attention import linear, masked, nsa

    def no_mask(*args: Any, **kwargs: Any) -> None:
        """Return None: these attentions are causal without a mask, and never attend to padding on the right."""

    is_flex = kind in _FLEX_KINDS
    eager = functools.partial(nsa.attention, eager=True)
    functions: dict[str, Any] = {"nsa": nsa.attention, "nsa-eager": eager, "linear": linear.attention}
    AttentionInterface.register(kind, functools.partial(masked.attention, kind) if is_flex else functions[kind])
    AttentionMaskInterface.register(kind, functools.partial(masked.make_model_mask, kind) if is_flex else no_mask)


def adapt(model: Any, kind: str) -> None:
    """Add the modules that attention `kind` needs to each attention layer of `model`; raise UsageError if the model
    does not allow another attention."""
    can_replace = getattr(type(model), "_can_set_attn_implementation", None)
    attention_modules = [item for item in model.named_modules() if type(item[1]).__name__.endswith("Attention")]
    layers = [(name, layer) for name, layer in attention_modules if hasattr(layer, "layer_idx")]
    if not layers or (can_replace is not None and not can_replace()):
        raise UsageError(f"--attention {kind}: this model's attention cannot be exchanged", value=type(model).__name__)
    if kind.startswith("nsa"):
        from memprof.workload.attention import nsa

        for name, layer in layers:
            nsa.install(name, layer)
