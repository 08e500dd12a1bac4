"""Models named by parameter count: "4B" is the published model known by that size, or else a Llama-shaped model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from memprof.errors import UsageError
from memprof.units import format_count, parse_count
from memprof.workload.catalog.models import ModelEntry, find_model

# The model that people mean by a size. "1B" is Llama 3.2 1B although that has 1.24B: the name is the better guide.
PUBLISHED_SIZES = {
    70_000_000: "pythia-70m",
    124_000_000: "gpt2",
    125_000_000: "opt-125m",
    135_000_000: "smollm2-135m",
    160_000_000: "pythia-160m",
    355_000_000: "gpt2-medium",
    360_000_000: "smollm2-360m",
    410_000_000: "pythia-410m",
    500_000_000: "qwen2.5-0.5b",
    600_000_000: "qwen3-0.6b",
    1_000_000_000: "llama-3.2-1b",
    1_100_000_000: "tinyllama-1.1b",
    1_400_000_000: "pythia-1.4b",
    1_500_000_000: "qwen2.5-1.5b",
    1_700_000_000: "qwen3-1.7b",
    3_000_000_000: "llama-3.2-3b",
    4_000_000_000: "qwen3-4b",
    7_000_000_000: "llama-2-7b",
    8_000_000_000: "llama-3.1-8b",
    9_000_000_000: "gemma-2-9b",
    12_000_000_000: "pythia-12b",
    13_000_000_000: "llama-2-13b",
    14_000_000_000: "qwen3-14b",
    27_000_000_000: "gemma-2-27b",
    32_000_000_000: "qwen3-32b",
    70_000_000_000: "llama-3.1-70b",
    72_000_000_000: "qwen2.5-72b",
    405_000_000_000: "llama-3.1-405b",
    671_000_000_000: "deepseek-v3",
}

SMALLEST = 100_000
LARGEST = 2_000_000_000_000

# The vocabulary grows with the model, since the embedding would otherwise be most of a small one: at least 1e9
# parameters as Llama 3, at least 1e8 as Llama 2, below that powers of two.
_VOCABULARIES = ((10**9, 128_256), (10**8, 32_000), (10**7, 8_192), (10**6, 2_048), (0, 256))
_UNTIED_FROM = 4 * 10**9  # Llama 3.2 ties the output head to the embedding at 1B and 3B; Llama 3.1 8B does not.
_ASPECTS = ((10**6, 32.0), (10**8, 64.0), (10**9, 112.0), (10**10, 120.0), (4 * 10**11, 130.0), (2 * 10**12, 140.0))
_INTERMEDIATE_RATIO = 3.5  # of Llama 3.1 8B and 70B


@dataclass(frozen=True, slots=True)
class _LlamaShape:
    """Dimensions of a Llama model, from which its number of parameters is computed."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def per_layer(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.per_layer + self.hidden


def resolve_size(text: str) -> ModelEntry:
    """Return the model for a size such as "4B" or "600M"; raise UsageError if it is not from SMALLEST to LARGEST.
    Sizes in PUBLISHED_SIZES give that published model, others a Llama-shaped model within 2% of the size."""
    count = parse_count(text)
    published = PUBLISHED_SIZES.get(count)
    return find_model(published) if published is not None else synthesize(count)


@cache
def synthesize(count: int) -> ModelEntry:
    """Return a Llama-shaped model within 2% of `count` parameters; raise UsageError unless SMALLEST to LARGEST."""
    if not SMALLEST <= count <= LARGEST:
        hint = f"give a size from {format_count(SMALLEST)} to {format_count(LARGEST)}"
        raise UsageError("cannot synthesise a model of this size", value=f"{count:,} parameters", hint=hint)
    shape = min(_generate_shapes(count), key=lambda candidate: _compute_shape_distance(candidate, count))
    size = format_count(count, ".6g")  # as the user would have typed it: 1.2B, 350M, 7B
    positions = 8192 if count >= 10**9 else 2048
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0 if count >= 10**9 else 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
    }
    note = (
        f"no published model is known as {size}: synthesised one of the shape of Llama with {shape.layers} layers, "
        f"hidden size {shape.hidden}, {shape.heads} heads of {shape.head_dim} ({shape.kv_heads} for keys and values), "
        f"intermediate size {shape.intermediate}, a vocabulary of {shape.vocabulary} and "
        f"{'tied' if shape.tied else 'untied'} embeddings: {shape.num_parameters:,} parameters"
    )
    return ModelEntry(
        key=f"llama-shaped-{size.lower()}",
        hf_id="",
        architecture="LlamaForCausalLM",
        task="causal-lm",
        num_parameters=shape.num_parameters,
        checkpoint_dtype="bfloat16",
        max_positions=positions,
        vocab_size=shape.vocabulary,
        sources=("synthesised by memprof",),
        note=note,
        synthesized=True,
        config=MappingProxyType(config),
    )


def _generate_shapes(count: int) -> Iterator[_LlamaShape]:
    """Yield Llama shapes with about `count` parameters, for several widths and numbers of layers; the MLP's size is
    chosen to come closest to `count`."""
    vocabulary = next(size for floor, size in _VOCABULARIES if count >= floor)
    is_tied = count < _UNTIED_FROM
    aspect = _interpolate_aspect(count)
    # count is about 12 to 15 * hidden**2 * layers; half and twice the solution of that bracket the width.
    center = (count * aspect / 13) ** (1 / 3)
    for hidden, heads, head_dim in _generate_widths(center / 3, center * 2):
        kv_heads = _choose_kv_heads(heads)
        multiple = 256 if hidden >= 2048 else 128 if hidden >= 1024 else 64 if hidden >= 256 else 8
        for layers in range(max(1, round(hidden / aspect / 1.5)), max(1, round(hidden / aspect * 1.5)) + 1):
            without_mlp = _LlamaShape(hidden, layers, heads, kv_heads, head_dim, 0, vocabulary, is_tied)
            num_multiples = (count - without_mlp.num_parameters) / (layers * 3 * hidden * multiple)
            # The nearest multiple, but at least one, so that there is always a candidate.
            intermediate = multiple * max(1, round(num_multiples))
            yield _LlamaShape(hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary, is_tied)


def _generate_widths(low: float, high: float) -> Iterator[tuple[int, int, int]]:
    """Yield (hidden size, heads, head size) for hidden sizes from `low` to `high`, and always for the smallest, 32.
    The head size is 128 from a hidden size of 3072 (Llama 3.2 3B), 64 from 256 (Llama 3.2 1B), else 16."""
    for head_dim, narrowest, widest, step in ((16, 32, 240, 16), (64, 256, 3008, 64), (128, 3072, 1 << 16, 512)):
        for hidden in range(narrowest, widest + 1, step):
            if low <= hidden <= high or hidden == 32:
                yield hidden, hidden // head_dim, head_dim


def _choose_kv_heads(heads: int) -> int:
    """Return the number of key-value heads for `heads` query heads: 8 as in Llama 3, 4 as in TinyLlama, or another
    divisor of `heads`. One or two heads have keys and values of their own."""
    if heads <= 2:
        return heads
    return next((count for count in (8, 4, 7, 6, 5, 3, 2) if count < heads and heads % count == 0), 1)


def _interpolate_aspect(count: int) -> float:
    """Return hidden size divided by layers, as in published models of `count` parameters (log interpolation)."""
    for (low, low_aspect), (high, high_aspect) in itertools.pairwise(_ASPECTS):
        if count <= high:
            fraction = max(0.0, math.log(count / low) / math.log(high / low))
            return low_aspect + fraction * (high_aspect - low_aspect)
    return _ASPECTS[-1][1]


def _compute_shape_distance(shape: _LlamaShape, count: int) -> tuple[float, int]:
    """Return a sort key of how far `shape` is from published Llamas and from `count` parameters; lower is better."""
    count_error = abs(shape.num_parameters / count - 1)
    aspect_error = abs(math.log(shape.hidden / shape.layers / _interpolate_aspect(count)))
    ratio_error = abs(math.log(shape.intermediate / shape.hidden / _INTERMEDIATE_RATIO))
    penalty = 0.0 if shape.kv_heads in (4, 8) or shape.heads < 8 else 0.3
    # The parameter count matters most: 1% off costs as much as an aspect ratio that is off by half. Shapes more than
    # 1.5% off are a last resort.
    return (aspect_error + ratio_error + penalty + 40 * count_error + (100 if count_error > 0.015 else 0), shape.hidden)
