"""Accuracy of precisions: the same weights and inputs in half precision, under AMP, and with quantized weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import apply
from memprof.flows.verify.reference import compute_in_float64
from memprof.flows.verify.specimens import Specimen, make_batches
from memprof.report.documents.verification import Precision
from memprof.workload.layers import find_layers

PRECISIONS = ("float16", "bfloat16")
_AMP_PREFIX = "amp-"
AMP = tuple(_AMP_PREFIX + precision for precision in PRECISIONS)
INT8 = "int8 weights"
# Successive roundings in a transformer layer, about: two norms, four products, attention, two sums.
_ROUNDINGS_PER_LAYER = 12
_AMPLIFICATION = 4
_INT8_MAX = 127


def measure_precisions(specimen: Specimen) -> list[Precision]:
    """Return the errors of each precision against float64, with the same weights and inputs on the CPU.

    AMP is `torch.autocast` over float32 weights. The bound assumes independent roundings in all layers: the
    relative error of a rounding times the root of the number of roundings, times 4 for amplification by the layers.
    """
    torch.manual_seed(0)
    model = specimen.build().float().eval()
    with compute_in_float64():
        expected = _run_forward(copy.deepcopy(model).double(), specimen)
    return [
        _measure_precision(precision, specimen, model, expected) for precision in ("float32", *PRECISIONS, *AMP, INT8)
    ]


def _measure_precision(precision: str, specimen: Specimen, model: nn.Module, expected: list[torch.Tensor]) -> Precision:
    converted = copy.deepcopy(model)
    if precision == INT8:
        rounding_error = _round_to_int8(converted)
    else:
        dtype: torch.dtype = getattr(torch, precision.removeprefix(_AMP_PREFIX))
        rounding_error = torch.finfo(dtype).eps / 2
        if dtype != torch.float32:
            apply(converted, precision, undoable=False)
    return _compare(precision, specimen, expected, _run_forward(converted, specimen), rounding_error)


def _compare(
    precision: str,
    specimen: Specimen,
    expected: list[torch.Tensor],
    outputs: list[torch.Tensor],
    rounding_error: float,
    max_bound: float = math.inf,
) -> Precision:
    logits, deviation = expected[-1], outputs[-1] - expected[-1]
    return Precision(
        precision,
        specimen.name,
        float(deviation.abs().max() / logits.abs().max()),
        _compute_relative_error(outputs[-1], logits),
        float((outputs[-1].argmax(-1) == logits.argmax(-1)).double().mean()),
        tuple(_compute_relative_error(mine, theirs) for mine, theirs in zip(outputs[:-1], expected[:-1], strict=True)),
        min(max_bound, _AMPLIFICATION * rounding_error * math.sqrt(_ROUNDINGS_PER_LAYER * len(expected))),
    )


def measure_quantized_weights(specimen: Specimen, fix: str) -> Precision:
    """Return the errors of a fix that quantizes weights, against float64; raise UsageError without its library.

    The model is `build_large`: bitsandbytes' packed CPU kernels need rows of full blocks."""
    torch.manual_seed(0)
    model = specimen.build_large().float().eval()
    quantized = copy.deepcopy(model)
    apply(quantized, fix, undoable=False)
    rounding = _measure_rounding_error(model, quantized)  # before a forward, which removes the scales from the weights
    with compute_in_float64():
        expected = _run_forward(copy.deepcopy(model).double(), specimen)
    # A bound above 1 would be useless: two unrelated tensors differ by 1.4.
    return _compare(fix, specimen, expected, _run_forward(quantized, specimen), rounding, max_bound=1.0)


def _compute_relative_error(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((outputs - expected).square().mean() / expected.square().mean()).sqrt())


def _run_forward(model: nn.Module, specimen: Specimen) -> list[torch.Tensor]:
    """Return the outputs of the layers and then the logits, all as float64."""
    outputs: list[torch.Tensor] = []

    def record_output(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append((output if isinstance(output, torch.Tensor) else output[0]).detach().double())

    handles = [layer.register_forward_hook(record_output) for _, layer in find_layers(model, "precision")]
    batch = make_batches(specimen, "plain", 0)[0]
    try:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"])[0]
    finally:
        for handle in handles:
            handle.remove()
    return [*outputs, logits.double()]


def _measure_rounding_error(model: nn.Module, quantized: nn.Module) -> float:
    """Return the largest relative error (root mean square) of the weights that bitsandbytes quantized."""
    import bitsandbytes as bnb

    worst = 0.0
    for name, module in quantized.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, bnb.nn.Linear4bit):
            found = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            found = weight.data.float() * weight.SCB.unsqueeze(1) / _INT8_MAX
        else:
            continue
        original: torch.Tensor = model.get_submodule(name).weight.detach()  # type: ignore[assignment,operator]
        worst = max(worst, _compute_relative_error(found, original if found.shape == original.shape else original.t()))
    # In 8 bits the activations are rounded like the weights.
    return worst * (math.sqrt(2) if any(isinstance(m, bnb.nn.Linear8bitLt) for m in quantized.modules()) else 1)


def _round_to_int8(model: nn.Module) -> float:
    """Round the layers' matrices to 8 bits in place, with one scale per row; return the largest relative error of a
    matrix (root mean square)."""
    max_error = 0.0
    for _, layer in find_layers(model, INT8):
        for parameter in layer.parameters():
            if parameter.dim() != 2:
                continue
            weight = parameter.detach()
            scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / _INT8_MAX
            rounded = (weight / scale).round() * scale
            max_error = max(max_error, _compute_relative_error(rounded, weight))
            parameter.data = rounded
    return max_error
