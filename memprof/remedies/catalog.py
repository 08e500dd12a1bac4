"""The remedies by name: what each changes, what it costs, and what it does not go with. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from memprof.errors import UsageError, unknown_name


class Numerics(StrEnum):
    """What a remedy does to the numbers of a run."""

    EXACT = "exact"
    """The same mathematics: it differs from the original by rounding alone, and no more than the original does."""
    APPROXIMATE = "approximate"
    """Numbers of lower precision: deviations that `memprof verify` shows."""
    DIFFERENT = "different"
    """Another model is trained: fewer weights, or a smaller vocabulary."""


@dataclass(frozen=True)
class Remedy:
    """One remedy.

    Args:
        name: as the user writes it.
        changes: what it does, in one line.
        saves: the categories of memory that shrink.
        cost: what is paid for it, in one line.
        numerics: what it does to the numbers.
        options: its options, name to meaning; the defaults are those of `memprof.apply`.
        required: options without which it cannot be applied.
        conflicts: remedies that it does not go with, each with the reason.
        packages: one of these is needed; empty if torch is enough.
    """

    name: str
    changes: str
    saves: tuple[str, ...]
    cost: str
    numerics: Numerics
    options: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


_REMEDIES = (
    Remedy(
        "bfloat16",
        "parameters in bfloat16",
        ("parameters", "gradients", "optimizer state", "activations", "logits and loss"),
        "8 bits of precision; updates below 1/256 of a weight are lost without float32 masters",
        Numerics.APPROXIMATE,
        conflicts={"float16": "a model has one dtype"},
    ),
    Remedy(
        "float16",
        "parameters in float16",
        ("parameters", "gradients", "optimizer state", "activations", "logits and loss"),
        "numbers above 65,504 overflow and gradients below 6e-8 vanish: scale the loss",
        Numerics.APPROXIMATE,
        conflicts={"bfloat16": "a model has one dtype"},
    ),
    Remedy(
        "vocabulary-cap",
        "embedding and head keep their first tokens",
        ("parameters", "gradients", "optimizer state", "logits and loss"),
        "token ids at or above the cap cannot be used any more",
        Numerics.DIFFERENT,
        options={"vocab_size": "tokens that stay"},
        required=("vocab_size",),
    ),
    Remedy(
        "freeze",
        "parameters that are not trained",
        ("gradients", "optimizer state"),
        "what is frozen does not learn",
        Numerics.DIFFERENT,
        options={"frozen": "patterns of parameter names, such as 'model.embed*'; * stands for anything"},
        required=("frozen",),
    ),
    Remedy(
        "lora",
        "small trained matrices beside a frozen model, put there by PEFT",
        ("gradients", "optimizer state"),
        "only the adapter learns",
        Numerics.DIFFERENT,
        options={
            "lora_rank": "of the matrices; 8 if not given",
            "lora_targets": "names of the modules to adapt; PEFT's for the architecture if not given",
        },
        conflicts={"freeze": "LoRA freezes the whole model itself"},
        packages=("peft",),
    ),
    Remedy(
        "sdpa-attention",
        "torch's scaled_dot_product_attention instead of scores kept in memory",
        ("activations",),
        "none: it is faster; no attention weights can be returned",
        Numerics.EXACT,
    ),
    Remedy(
        "chunked-loss",
        "the loss is computed some tokens at a time: the full logits never exist",
        ("logits and loss",),
        "one more product with the head's weight: a third of the head's time",
        Numerics.EXACT,
        options={
            "chunk_size": "tokens whose logits exist at a time; chosen from chunk_bytes if not given",
            "chunk_bytes": "bytes that a chunk of logits may take; 1 GiB if not given",
            "threshold": "bytes of full logits below which nothing is chunked, or 'auto'; 0 if not given",
            "head": "name of the head, where the model does not tell",
        },
    ),
    Remedy(
        "activation-checkpointing",
        "layers keep their inputs alone and run again in the backward",
        ("activations",),
        "one more forward of what is checkpointed",
        Numerics.EXACT,
        options={
            "every": "checkpoint every n-th layer; 1 if not given",
            "modules": "checkpoint the modules of these names instead; * stands for anything",
        },
    ),
    Remedy(
        "cpu-offload-activations",
        "what layers keep for the backward waits in host memory",
        ("activations",),
        "every such byte crosses the bus twice in a step",
        Numerics.EXACT,
        options={"min_bytes": "tensors below this stay on the card; 1 MiB if not given"},
    ),
    Remedy(
        "cpu-offload-weights",
        "the weights of a layer are on the card while it runs, in host memory otherwise",
        ("parameters", "gradients", "activations"),
        "the weights cross the bus twice in a step, their gradients once; layers run again in the backward",
        Numerics.EXACT,
        conflicts={
            "activation-checkpointing": "it runs the layers again in the backward itself",
            "cpu-offload-activations": "it keeps nothing but the layers' inputs",
            "optimizer-in-backward": "gradients of offloaded weights arrive in host memory after the layer's backward",
        },
    ),
    Remedy(
        "optimizer-in-backward",
        "each parameter is updated as soon as its gradient is there, and the gradient freed",
        ("gradients",),
        "no gradient accumulation, clipping by norm or loss scaling",
        Numerics.EXACT,
        options={"optimizer": "a function from a list of parameters to an optimizer"},
        required=("optimizer",),
    ),
    Remedy(
        "8-bit-optimizer",
        "AdamW whose two states take one byte per parameter each",
        ("optimizer state",),
        "states are quantized in blocks",
        Numerics.APPROXIMATE,
        options={"learning_rate": "1e-4 if not given"},
        conflicts={"optimizer-in-backward": "give that the 8-bit optimizer: optimizer=bitsandbytes.optim.AdamW8bit"},
        packages=("bitsandbytes", "torchao"),
    ),
)

REMEDIES: Mapping[str, Remedy] = {remedy.name: remedy for remedy in _REMEDIES}
"""In the order in which they are switched on, whatever the order in which they were named."""


def find_remedies(names: str | Sequence[str]) -> list[Remedy]:
    """The remedies of these names, in the order in which they are switched on.

    Args:
        names: a list, or one string with commas.

    Raises:
        UsageError: no name, an unknown one, one twice, or two that do not go together.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not names:
        raise UsageError("no remedy is named", hint="known: " + ", ".join(REMEDIES))
    seen: set[str] = set()
    for name in names:
        if name not in REMEDIES:
            raise unknown_name("remedy", name, REMEDIES)
        if name in seen:
            raise UsageError("a remedy is named twice", value=repr(name))
        seen.add(name)
    chosen = [remedy for remedy in _REMEDIES if remedy.name in seen]
    for remedy in chosen:
        check_conflicts(remedy, seen - {remedy.name})
    return chosen


def check_conflicts(remedy: Remedy, others: set[str]) -> None:
    """See that `remedy` goes with `others`.

    Raises:
        UsageError: it does not; says with which, and why.
    """
    for other in sorted(others):
        reason = remedy.conflicts.get(other) or REMEDIES[other].conflicts.get(remedy.name)
        if reason is not None:
            raise UsageError(
                "two remedies do not go together", value=f"{remedy.name!r} and {other!r}", hint=f"use one: {reason}"
            )


def options_by_remedy(chosen: Sequence[Remedy], options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """`options` sorted by the remedy that takes each.

    Raises:
        UsageError: no chosen remedy takes an option, or one lacks what it needs.
    """
    for name in options:
        if not any(name in remedy.options for remedy in chosen):
            owner = next((remedy.name for remedy in _REMEDIES if name in remedy.options), None)
            if owner is not None:
                raise UsageError("an option of a remedy that is not named", value=repr(name), hint=f"add {owner!r}")
            raise unknown_name("option", name, [known for remedy in chosen for known in remedy.options])
    for remedy in chosen:
        for name in remedy.required:
            if name not in options:
                raise UsageError(
                    f"{remedy.name} needs an option", value=name, hint=f"{name}=...: {remedy.options[name]}"
                )
    return {
        remedy.name: {name: value for name, value in options.items() if name in remedy.options} for remedy in chosen
    }
