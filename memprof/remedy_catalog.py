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
        packages: what is needed beside torch: of two that do the same, either.
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


_NO_AMP = dict.fromkeys(("amp-bfloat16", "amp-float16"), "autocast is for parameters in float32")

_OPTIMIZER = "a function from a list of parameters to an optimizer"
_ONE_OPTIMIZER_EACH = {
    "fused-optimizer": {
        "optimizer-in-backward": "give that a fused one: optimizer=lambda p: torch.optim.AdamW(p, fused=True)",
        "8-bit-optimizer": "a parameter has one optimizer",
        "cpu-offload-optimizer": "a parameter has one optimizer",
    },
    "cpu-offload-optimizer": {
        "optimizer-in-backward": "a parameter has one optimizer",
        "8-bit-optimizer": "a parameter has one optimizer",
    },
}
_FOUR_BITS = {
    "quant_type": "'nf4' or 'fp4'; nf4 if not given",
    "double_quant": "whether the scales are quantized in turn; True if not given",
}
_LORA = {
    "lora_rank": "of the matrices; 8 if not given",
    "lora_targets": "names of the modules to adapt; PEFT's for the architecture if not given",
}

_REMEDIES = (
    Remedy(
        "expandable-segments",
        "the caching allocator grows its segments in place instead of asking for others",
        ("fragmentation",),
        "none to speak of; for the whole process, and what is on the card already stays where it is",
        Numerics.EXACT,
    ),
    Remedy(
        "device-placement",
        "tensors that modules hold or make on another device than their parameters' are moved, and made there",
        (),
        "what is moved takes bytes on the card; so does what a forward makes without naming a device",
        Numerics.EXACT,
        options={"keep_on_host": "patterns of names of tensors that stay where they are; * stands for anything"},
        conflicts={"cpu-offload-weights": "its layers are in host memory on purpose"},
    ),
    Remedy(
        "bfloat16",
        "parameters in bfloat16",
        ("parameters", "gradients", "optimizer state", "activations", "logits and loss"),
        "8 bits of precision; updates below 1/256 of a weight are lost without float32 masters",
        Numerics.APPROXIMATE,
        conflicts={"float16": "a model has one dtype", **_NO_AMP},
    ),
    Remedy(
        "float16",
        "parameters in float16",
        ("parameters", "gradients", "optimizer state", "activations", "logits and loss"),
        "numbers above 65,504 overflow and gradients below 6e-8 vanish: scale the loss",
        Numerics.APPROXIMATE,
        conflicts={"bfloat16": "a model has one dtype", **_NO_AMP},
    ),
    Remedy(
        "amp-bfloat16",
        "the forward under autocast: products in bfloat16, parameters in float32",
        ("activations", "logits and loss"),
        "8 bits of precision in products; half copies of the weights during the forward",
        Numerics.APPROXIMATE,
        conflicts={"amp-float16": "autocast has one dtype"},
    ),
    Remedy(
        "amp-float16",
        "the forward under autocast: products in float16, parameters in float32",
        ("activations", "logits and loss"),
        "gradients below 6e-8 vanish: scale the loss with the GradScaler that is the result",
        Numerics.APPROXIMATE,
        conflicts={
            "amp-bfloat16": "autocast has one dtype",
            "optimizer-in-backward": "parameters would be updated with scaled gradients",
        },
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
        "8-bit-weights",
        "linear layers but the head in bitsandbytes' LLM.int8: one byte a weight, frozen",
        ("parameters", "gradients", "optimizer state"),
        "rounded weights and activations; the quantized layers do not learn",
        Numerics.APPROXIMATE,
        conflicts={
            "4-bit-weights": "weights are quantized once",
            "qlora": "its weights are in 4 bits",
            "cpu-offload-weights": "quantized weights and their scales stay together on the card",
        },
        packages=("bitsandbytes",),
    ),
    Remedy(
        "4-bit-weights",
        "linear layers but the head in bitsandbytes' 4-bit format: half a byte a weight, frozen",
        ("parameters", "gradients", "optimizer state"),
        "16 values a weight; each is unpacked for its product; the quantized layers do not learn",
        Numerics.APPROXIMATE,
        options=_FOUR_BITS,
        conflicts={
            "qlora": "it quantizes the weights itself",
            "cpu-offload-weights": "quantized weights and their scales stay together on the card",
        },
        packages=("bitsandbytes",),
    ),
    Remedy(
        "qlora",
        "weights in 4 bits, and PEFT's trained matrices beside them",
        ("parameters", "gradients", "optimizer state"),
        "16 values a weight; only the adapter learns",
        Numerics.APPROXIMATE,
        options={**_FOUR_BITS, **_LORA},
        conflicts={
            "lora": "it attaches LoRA itself",
            "freeze": "LoRA freezes the whole model itself",
            "cpu-offload-weights": "quantized weights and their scales stay together on the card",
        },
        packages=("bitsandbytes", "peft"),
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
        options=_LORA,
        conflicts={"freeze": "LoRA freezes the whole model itself"},
        packages=("peft",),
    ),
    Remedy(
        "low-rank-npt",
        "NPT components never make a weight delta: h W + ((h A) * m) B",
        ("activations", "temporaries"),
        "none: it is faster",
        Numerics.EXACT,
        conflicts={"cpu-offload-npt-delta": "without a delta there is nothing to offload"},
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
            "policy": "'selective' keeps the results of matrix products and attention, and runs the rest again; "
            "'full' keeps nothing; full if not given",
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
        "cpu-offload-npt-delta",
        "the weight delta of an NPT component waits in host memory between forward and backward",
        ("activations",),
        "every delta crosses the bus twice in a step; one is still on the card at a time",
        Numerics.EXACT,
        conflicts={"activation-checkpointing": "layers that run again keep no delta"},
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
        "micro-batch",
        "a batch goes through forward and backward some rows at a time; gradients add up to those of the whole",
        ("activations", "logits and loss", "inputs"),
        "kernels work on fewer rows: slower where these do not fill the card",
        Numerics.EXACT,
        options={
            "micro_batch_size": "rows at a time; 1 if not given",
            "shift_labels": "whether the model's loss compares each position with the next label; found out if not "
            "given",
            "ignore_index": "label that the loss leaves out; -100 if not given",
            "loss": "a function from the model's outputs and the batch to the loss; the outputs' own if not given",
        },
        conflicts={"optimizer-in-backward": "it steps after each micro-batch, and not after the last"},
    ),
    Remedy(
        "streamed-batches",
        "batches are made one at a time instead of all of them before training",
        ("host memory",),
        "each batch is put together while the card waits, unless workers do it",
        Numerics.EXACT,
        options={
            "dataset": "the samples: a Dataset, a list, a tensor, or a dictionary of tensors by sample",
            "batch_size": "samples of a batch; 1 if not given",
        },
        required=("dataset",),
    ),
    Remedy(
        "fused-optimizer",
        "an optimizer step is one kernel for many parameters, which needs no temporaries",
        ("temporaries",),
        "none: it is faster",
        Numerics.EXACT,
        options={"optimizer": _OPTIMIZER + ", or an optimizer that is there; AdamW at 1e-4 if not given"},
        conflicts=_ONE_OPTIMIZER_EACH["fused-optimizer"],
    ),
    Remedy(
        "cpu-offload-optimizer",
        "optimizer state and the step in host memory; the card has parameters and gradients alone",
        ("optimizer state", "temporaries"),
        "gradients and parameters cross the bus once a step each; the CPU computes the step",
        Numerics.EXACT,
        options={
            "optimizer": _OPTIMIZER + "; AdamW at 1e-4 if not given",
            "offload_gradients": "True: gradients go to host memory, and are freed, as soon as they are there",
        },
        conflicts={
            **_ONE_OPTIMIZER_EACH["cpu-offload-optimizer"],
            "cpu-offload-weights": "any optimizer over layers in host memory steps there",
        },
    ),
    Remedy(
        "optimizer-in-backward",
        "each parameter is updated as soon as its gradient is there, and the gradient freed",
        ("gradients",),
        "no gradient accumulation, clipping by norm or loss scaling",
        Numerics.EXACT,
        options={"optimizer": _OPTIMIZER},
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
