"""Precision against accuracy: the same weights and inputs in float16, bfloat16 and with int8 weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import nn

from memprof.remedies.implementation.applied import apply
from memprof.remedies.implementation.layers import find_layers
from memprof.remedies.implementation.specimens import Specimen, batches
from memprof.remedies.verification import Precision

INT8 = "int8 weights"
_ROUNDINGS = 12
"""Results that a transformer layer rounds one after another, about: two norms, four products, attention, two sums."""
_AMPLIFICATION = 4
_INT8_LARGEST = 127


def precision_rows(specimen: Specimen, precisions: Sequence[str]) -> list[Precision]:
    """One row per precision, against float32 on the CPU.

    The bound takes the roundings of all layers as independent: one rounding's relative error times the root of their
    number, times 4 for what layers amplify.
    """
    torch.manual_seed(0)
    model = specimen.build().float().eval()
    wanted = _forward(model, specimen)
    rows = []
    for precision in precisions:
        changed = copy.deepcopy(model)
        if precision == INT8:
            rounding = _to_int8(changed)
        else:
            apply(changed, precision, undoable=False)
            rounding = torch.finfo(getattr(torch, precision)).eps / 2
        found = _forward(changed, specimen)
        logits, deviation = wanted[-1], found[-1] - wanted[-1]
        agree = (found[-1].argmax(-1) == logits.argmax(-1)).double().mean()
        rows.append(
            Precision(
                precision,
                specimen.name,
                float(deviation.abs().max() / logits.abs().max()),
                _relative(found[-1], logits),
                float(agree),
                tuple(_relative(mine, theirs) for mine, theirs in zip(found[:-1], wanted[:-1], strict=True)),
                _AMPLIFICATION * rounding * math.sqrt(_ROUNDINGS * len(wanted)),
            )
        )
    return rows


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).square().mean() / wanted.square().mean()).sqrt())


def _forward(model: nn.Module, specimen: Specimen) -> list[torch.Tensor]:
    """The outputs of the layers and, last, the logits, as float64."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append((output if isinstance(output, torch.Tensor) else output[0]).detach().double())

    handles = [layer.register_forward_hook(keep) for _, layer in find_layers(model, "precision")]
    batch = batches(specimen, "plain", 0)[0]
    try:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"])[0]
    finally:
        for handle in handles:
            handle.remove()
    return [*outputs, logits.double()]


def _to_int8(model: nn.Module) -> float:
    """Round the layers' matrices to 8 bits, by rows with their largest number at 127, in place.

    Returns:
        The largest relative error of a matrix (root mean square).
    """
    worst = 0.0
    for _, layer in find_layers(model, INT8):
        for parameter in layer.parameters():
            if parameter.dim() != 2:
                continue
            weight = parameter.detach()
            scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / _INT8_LARGEST
            rounded = (weight / scale).round() * scale
            worst = max(worst, _relative(rounded, weight))
            parameter.data = rounded
    return worst
