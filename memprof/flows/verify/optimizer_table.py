"""Accuracy of 8-bit optimizers: some steps of each, and of float32 and bfloat16 AdamW, compared with float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.fixes.applied import apply
from memprof.flows.verify.reference import compute_in_float64
from memprof.flows.verify.specimens import Specimen, make_batches
from memprof.report.documents.verification import OptimizerRow

STEPS = 3
LEARNING_RATE = 1e-3
FLOAT32, BFLOAT16 = "float32 AdamW", "bfloat16 AdamW"
# Bounds of the deviation, as a share of the distance that the parameters move. Float32: AdamW divides a gradient by its
# own size, so that a gradient of pure rounding error makes a step of rounding error. Bfloat16, for comparison, has no
# bound. 8 bits: at most the distance that AdamW moves; a second moment much smaller than the largest of its block is
# rounded to 0, and the update is then the first moment over AdamW's epsilon, which `largest` shows.
_BOUNDS: dict[str, float | None] = {FLOAT32: 0.05, BFLOAT16: None}
_EIGHT_BIT_BOUND = 1.0


def measure_optimizers(specimen: Specimen, fix: str) -> list[OptimizerRow]:
    """Return rows of float32 AdamW, AdamW with bfloat16 weights and states, and the 8-bit optimizer of `fix`.

    All start from weights representable in bfloat16. The model is `build_large`: these optimizers quantize no tensor
    below 4,096 elements. Raises UsageError: no 8-bit optimizer is installed, or it does not run on the CPU.
    """
    torch.manual_seed(0)
    model = specimen.build_large().float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))

    def make_eight_bit(model: nn.Module) -> Any:
        return apply(model, fix, undoable=False, learning_rate=LEARNING_RATE).results[fix]

    eight_bit = _train(copy.deepcopy(model), specimen, make_eight_bit)
    with compute_in_float64():
        reference = _train(copy.deepcopy(model).double(), specimen, _make_adamw)
    initial = [parameter.detach().double() for parameter in model.parameters()]
    distance = math.sqrt(sum(float((p - b).square().sum()) for p, b in zip(reference[0], initial, strict=True)))
    rows = []
    for name, (parameters, loss, state_bytes) in (
        (FLOAT32, _train(copy.deepcopy(model), specimen, _make_adamw)),
        (BFLOAT16, _train(copy.deepcopy(model).to(torch.bfloat16), specimen, _make_adamw)),
        (fix, eight_bit),
    ):
        deviations = [p - e for p, e in zip(parameters, reference[0], strict=True)]
        rows.append(
            OptimizerRow(
                name,
                specimen.name,
                STEPS,
                math.sqrt(sum(float(deviation.square().sum()) for deviation in deviations)) / distance,
                max(float(deviation.abs().max()) for deviation in deviations) / LEARNING_RATE,
                abs(loss - reference[1]),
                state_bytes,
                _BOUNDS.get(name, _EIGHT_BIT_BOUND),
            )
        )
    return rows


def _make_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def _train(
    model: nn.Module, specimen: Specimen, make_optimizer: Callable[[nn.Module], Any]
) -> tuple[list[torch.Tensor], float, int]:
    """Return parameters (float64) and loss after STEPS steps, and the bytes of the optimizer's state."""
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.01
    for step in range(STEPS):
        model(**make_batches(specimen, "plain", step)[0])[0].backward()
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError, AttributeError, ImportError, AssertionError) as error:
            problem = f"{type(optimizer).__module__.partition('.')[0]} has no kernel for the CPU here"
            raise UsageError(problem, value=(str(error).splitlines() or [type(error).__name__])[0]) from None
        optimizer.zero_grad()
    with torch.no_grad():
        loss = float(model(**make_batches(specimen, "plain", STEPS)[0])[0])
    values = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(_count_tensor_bytes(value) for value in values if isinstance(value, torch.Tensor) and value.dim())
    return [parameter.detach().double() for parameter in model.parameters()], loss, state_bytes


def _count_tensor_bytes(tensor: torch.Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    # A subclass of quantized tensors returns the names of its tensors of codes and scales.
    return sum(_count_tensor_bytes(getattr(tensor, name)) for name in flatten()[0])
