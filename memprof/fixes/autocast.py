"""Fixes amp-bfloat16 and amp-float16: the forward under autocast, the parameters in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward
from memprof.fixes.catalog.fix import Fix, Numerics, Tier
from memprof.fixes.optimizers import refuse_gradients


@Fix(
    name="amp-bfloat16", order=50, numerics=Numerics.APPROXIMATE, saves=("activations", "logits and loss"),
    changes="run the forward under autocast: products in bfloat16, parameters in float32",
    cost="8 bits of precision in products; half copies of the weights during the forward",
    bench="precision", conflicts={"amp-float16": "autocast has one dtype"},
    edit="memprof.fixes.spec_edits:set_autocast", detect=lambda spec: spec.amp == "bfloat16",
    for_float32=True, half_precision="bfloat16", ladder_order=95, script_order=60, search_order=120,
    tiers=(Tier.AUTOCAST,),
)  # fmt: skip
@Fix(
    name="amp-float16", order=60, numerics=Numerics.APPROXIMATE, saves=("activations", "logits and loss"),
    changes="run the forward under autocast: products in float16, parameters in float32",
    cost="gradients below 6e-8 vanish: scale the loss with the GradScaler that is the result",
    bench="precision",
    conflicts={
        "amp-bfloat16": "autocast has one dtype",
        "optimizer-in-backward": "parameters would be updated with scaled gradients",
    },
    edit="memprof.fixes.spec_edits:set_autocast", detect=lambda spec: spec.amp == "float16",
    for_float32=True, half_precision="float16", ladder_order=96, search_order=121, tiers=(Tier.AUTOCAST,),
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Run the forward under autocast, and cast half-precision parameters to float32; the result of amp-float16 is a
    GradScaler. Raises UsageError if the model has no parameters, or gradients in half precision."""
    dtype: torch.dtype = getattr(torch, changes.fix.removeprefix("amp-"))
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if not parameters:
        raise changes.does_not_apply("the model has no parameters", model)
    half_parameters = [parameter for parameter in parameters if parameter.dtype in (torch.float16, torch.bfloat16)]
    refuse_gradients(half_parameters, changes.fix, type(model).__name__, "of another dtype")
    for parameter in half_parameters:
        changes.set_data(parameter, parameter.detach().float())
    if half_parameters:
        changes.note(f"{len(half_parameters)} parameters became float32")
    changes.set_attribute(model, "forward", _AutocastForward(model, dtype))
    scaler_note = ""
    if dtype == torch.float16:
        changes.result(torch.amp.GradScaler(parameters[0].device.type))
        scaler_note = "; scale the loss with the GradScaler in the results"
    changes.note(f"forward under autocast to {str(dtype).removeprefix('torch.')}{scaler_note}")


class _AutocastForward(ReplacedForward):
    """Replaced forward of a model, under autocast for the device type of the model's parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self._module.parameters()).device.type
        with torch.autocast(device, dtype=self._dtype):
            return self._forward(*args, **kwargs)
