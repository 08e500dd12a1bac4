"""Fixes bfloat16 and float16: the parameters in half precision."""

from __future__ import annotations

import re

import torch
from torch import nn

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import WEIGHTS, Fix, Numerics, Tier
from memprof.fixes.optimizers import refuse_gradients


@Fix(
    name="bfloat16", order=30, numerics=Numerics.APPROXIMATE, saves=(*WEIGHTS, "activations", "logits and loss"),
    changes="convert parameters to bfloat16",
    in_code="convert parameters to bfloat16 (model.to(torch.bfloat16) before it goes to the GPU; its float inputs too)",
    cost="8 bits of precision; updates below 1/256 of a weight are lost without float32 masters",
    bench="precision",
    conflicts={
        "float16": "a model has one dtype",
        **dict.fromkeys(("amp-bfloat16", "amp-float16"), "autocast is for parameters in float32"),
    },
    edit="memprof.fixes.spec_edits:set_half_precision", detect=lambda spec: spec.dtype == "bfloat16", for_float32=True,
    half_precision="bfloat16", ladder_order=135, search_order=120, tiers=(Tier.HALF_WEIGHTS,),
    helps={"doctor: weights": 10, "doctor: smaller": 10},
    doctor_texts={"doctor: smaller": "parameters and activations in half precision, if they are float32 (autocast: "
           "amp-bfloat16)"},
)  # fmt: skip
@Fix(
    name="float16", order=40, numerics=Numerics.APPROXIMATE, saves=(*WEIGHTS, "activations", "logits and loss"),
    changes="convert parameters to float16",
    cost="numbers above 65,504 overflow and gradients below 6e-8 vanish: scale the loss",
    bench="precision",
    conflicts={
        "bfloat16": "a model has one dtype",
        **dict.fromkeys(("amp-bfloat16", "amp-float16"), "autocast is for parameters in float32"),
    },
    edit="memprof.fixes.spec_edits:set_half_precision", detect=lambda spec: spec.dtype == "float16", for_float32=True,
    half_precision="float16", updates_vanish=True, ladder_order=136, search_order=121, tiers=(Tier.HALF_WEIGHTS,),
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Cast the parameters to the dtype in the fix's name.

    Buffers keep their dtype (rotary frequencies in half precision would be too coarse), and so do parameters that a
    model keeps in float32 (transformers' `_keep_in_fp32_modules`). Raises UsageError if all parameters have the dtype
    already, or parameters to be cast have gradients.
    """
    dtype: torch.dtype = getattr(torch, changes.fix)
    attribute_names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept_names = [name for attribute in attribute_names for name in getattr(model, attribute, None) or ()]
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in kept_names)) if kept_names else None
    parameters = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype != dtype and not (pattern and pattern.search(name))
    ]
    if not parameters:
        raise changes.already_on(f"every parameter is {changes.fix}")
    refuse_gradients(parameters, changes.fix, type(model).__name__, "of another dtype")
    old_dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    for parameter in parameters:
        changes.set_data(parameter, parameter.detach().to(dtype))
    changes.note(f"{len(parameters)} parameters: {old_dtypes} became {changes.fix}")
