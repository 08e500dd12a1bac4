"""Precision against accuracy: the same weights and inputs in lower precision, against float32, for real on this CPU."""

from __future__ import annotations

from typing import NamedTuple

import transformers

from memprof.flows.verify.precision_table import INT8, measure_precisions
from memprof.flows.verify.specimens import SPECIMENS, Specimen

PRECISIONS = ("float16", "bfloat16", INT8)
DEEP = Specimen(
    "16 layers",
    lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=16,
            num_attention_heads=4,
            vocab_size=8000,
            attn_implementation="eager",
        )
    ),
    None,
    8000,
    ("plain",),
    tokens=128,
)
"""As deep as Llama-3.2-1B; the others are those of `memprof verify`. All have random weights."""


class Deviations(NamedTuple):
    """What one precision does to all models."""

    least: float
    """The smallest deviation of a layer's output (root mean square, relative) in any model."""
    most: float
    logits: float
    """The largest deviation of logits."""
    agreement: tuple[int, int]
    """Positions whose likeliest token is the same, of how many."""


def measured() -> dict[str, Deviations]:
    """By precision."""
    models = [*SPECIMENS.values(), DEEP]
    rows = [(model, row) for model in models for row in measure_precisions(model) if row.precision in PRECISIONS]
    found = {}
    for precision in PRECISIONS:
        mine = [(model, row) for model, row in rows if row.precision == precision]
        layers = [value for _, row in mine for value in row.layers_rms]
        positions = [2 * model.tokens for model, _ in mine]
        same = sum(round(row.argmax_agreement * count) for (_, row), count in zip(mine, positions, strict=True))
        found[precision] = Deviations(
            min(layers), max(layers), max(row.logits_rms for _, row in mine), (same, sum(positions))
        )
    return found


__all__ = ["DEEP", "INT8", "PRECISIONS", "Deviations", "measured"]
