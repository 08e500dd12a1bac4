"""Which figures of case study 5 hold, and the right ones: every number here is computed, measured or out of a run."""

from __future__ import annotations

from typing import NamedTuple

import losses
import rotary
from specs import BEFORE, CHUNK, HIDDEN, LENGTHS, TOKENS, VOCABULARY

from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.units import GIB, MIB, format_bytes
from memprof.workload.catalog import find_model

LOGITS = TOKENS * VOCABULARY * 2
"""Bytes of all logits in bfloat16."""
ROTARY_CACHES = 36 * 2 * TOKENS * (HIDDEN // 32) * 2
"""Bytes of cosines and sines for heads of 80 numbers in bfloat16, in every layer."""


class Claim(NamedTuple):
    """A sentence of the report, whether it holds, and what is right."""

    text: str
    verdict: str
    right: str


class Runs(NamedTuple):
    """Forward and backward on the report's GPU, with each loss."""

    full: Report
    """All logits: the report before."""
    model_own: Report
    """transformers' own loss."""
    loop: Report
    """The report's loop over chunks."""
    chunked: Report
    """The fix."""
    training: Report
    """The fix, in two steps with AdamW."""


class Length(NamedTuple):
    """A length of the report's table under the automatic threshold."""

    tokens: int
    logits_bytes: int
    largest_bytes: int
    """The largest tensor of logits or loss that the run makes."""


def runs() -> Runs:
    """All of them."""
    return Runs(
        losses.on_gpu(losses.full, TOKENS).report(),
        profile(BEFORE)[1],
        losses.on_gpu(losses.loop, TOKENS).report(),
        losses.on_gpu(losses.own, TOKENS, chunk_size=CHUNK).report(),
        losses.on_gpu(losses.own, TOKENS, chunk_size=CHUNK, steps=2).report(),
    )


def lengths() -> list[Length]:
    """The report's lengths, with a model of two layers: the head and the loss are the same."""
    found = []
    for tokens in LENGTHS:
        trace = losses.on_gpu(losses.own, tokens, layers=2, chunk_size=CHUNK, threshold="auto").trace
        rows = [s.num_bytes for s in trace.storages if s.shape[-1:] == (VOCABULARY,) and not s.hidden]
        found.append(Length(tokens, tokens * VOCABULARY * 2, max(rows)))
    return found


def stage(document: Report, name: str) -> int:
    """Bytes allocated at the end of the last stage of this name."""
    return [row.allocated_bytes for row in document.stages if row.name == name][-1]


def loss_bytes(document: Report) -> int:
    """The most that logits and loss take: at the peak, or in the forward beside what the layers left."""
    forward = max(row.peak_allocated_bytes for row in document.stages if row.name in ("logits", "loss"))
    return max(document.peak.categories["logits and loss"], forward - stage(document, "final norm"))


def is_about(num_bytes: float, gib: float) -> str:
    """The verdict on a figure that the report gives in "GB" with two decimals."""
    return "holds, in GiB" if round(num_bytes / GIB, 2) == gib else "does not hold"


def extra_product(tokens: int) -> float:
    """One more product with the head's weight, as a part of a checkpointed step's operations (without the optimizer).

    A product of [m x k] and [k x n] takes 2 m k n operations and twice as many in the backward; causal attention half
    of two products of tokens x tokens; layers run twice in the forward.
    """
    config = find_model(BEFORE.model).load_config()
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    weights = width * size * (2 * heads + 2 * groups) + 3 * width * config["intermediate_size"]
    layer = 2 * tokens * weights + 2 * tokens**2 * heads * size
    head = 2 * tokens * width * config["vocab_size"]
    return head / (4 * layers * layer + 3 * head)


def claims(found: Runs) -> list[Claim]:
    """The report's figures about logits and memory."""
    full, verdict = found.full.peak.categories["logits and loss"], found.full.verdict
    tried, in_use = verdict.tried_to_allocate_bytes or 0, verdict.in_use_bytes or 0
    layers_end = stage(found.chunked, "final norm")
    peak, categories = found.chunked.peak, found.chunked.peak.categories
    divided = sum(categories.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
    both = divided // 2 + peak.allocated_bytes - divided
    # What is left of the report's own figures without the logits: GB there are GiB, as 37.09 shows.
    rest = 62.97 - LOGITS / GIB
    return [
        Claim(
            "logits of 131,072 x 151,936 in bfloat16: 37.09 GB",
            is_about(LOGITS, 37.09),
            f"{format_bytes(LOGITS)}, {LOGITS / 1e9:.2f} GB; the report's GB are GiB throughout",
        ),
        Claim(
            "tried to allocate 37.09 GiB on a GPU of 94.97 GiB",
            "holds" if not verdict.fits and round(tried / GIB, 2) == 37.09 else "does not hold",
            f"{verdict.oom_op} of {verdict.oom_dtype} {list(verdict.oom_shape or ())}: {format_bytes(tried)} refused "
            f"with {format_bytes(in_use)} in use, on {format_bytes(found.full.device.total_bytes)}",
        ),
        Claim(
            "cross entropy adds ~74 GB in float32; 111 GB for the loss alone",
            "the sum holds, in GiB" if round(full / LOGITS) == 3 else "does not hold",
            f"{format_bytes(full)}: logits, their log-softmax and its gradient, all three in bfloat16 (the failed "
            "allocation is no float32). A loss that copies to float32 first, as transformers' own, takes "
            f"{format_bytes(found.model_own.peak.categories['logits and loss'])}",
        ),
        Claim(
            "parameters: 8.72 GB, 3.92B in bfloat16",
            "with the rotary caches" if abs(3.92e9 * 2 + ROTARY_CACHES - 8.72 * GIB) < 0.02 * GIB else "does not hold",
            f"3.92B take {3.92e9 * 2 / GIB:.2f} GiB; cosines and sines of all positions, which the report's model "
            f"keeps in each layer, {format_bytes(ROTARY_CACHES)}. The model here keeps none and has "
            f"{found.model_own.target.num_parameters / 1e9:.2f}B, "
            f"{format_bytes(found.full.peak.categories['parameters'])}",
        ),
        Claim(
            "after embedding: +640 MB for hidden states",
            "holds, in MiB" if TOKENS * HIDDEN * 2 == 640 * MIB else "does not hold",
            f"{format_bytes(TOKENS * HIDDEN * 2)} for width {HIDDEN:,}; as much again is kept for every checkpointed "
            "layer",
        ),
        Claim(
            "after full forward: 62.97 GB of layer activations",
            "does not hold" if LOGITS > 0.5 * 62.97 * GIB else "holds",
            f"{LOGITS / GIB:.2f} GiB of it are the logits. The {rest:.2f} GiB without them are what the report has "
            f"after the first layer already (25.87). Here {format_bytes(layers_end)} after all layers",
        ),
        Claim(
            "chunked loss: one chunk at a time, ~66 GB",
            "forward without gradients only" if found.loop.peak.categories["logits and loss"] > LOGITS else "holds",
            "in training autograd keeps the log-softmax of every chunk of the loop: "
            f"{format_bytes(stage(found.loop, 'loss'))} after the loss, of which "
            f"{format_bytes(stage(found.loop, 'loss') - layers_end)} are the loss's. The report's own 66 GB are "
            f"{66 - rest:.0f} GiB more than without logits. With chunked-loss: "
            f"{format_bytes(stage(found.chunked, 'loss'))} after the loss",
        ),
        Claim(
            "savings: 37-74 GB",
            "more" if found.full.peak.allocated_bytes - peak.allocated_bytes > 74 * GIB else "holds",
            f"the peak would have been {format_bytes(found.full.peak.allocated_bytes)} in the backward before; it is "
            f"{format_bytes(found.loop.peak.allocated_bytes)} with the loop, {format_bytes(peak.allocated_bytes)} with "
            "chunked-loss",
        ),
        Claim(
            "activations of 60-90 GB even with checkpointing",
            "does not hold" if peak.allocated_bytes < 60 * GIB else "holds",
            f"{format_bytes(peak.allocated_bytes)} at the peak in {peak.stage}, parameters and all: checkpoints of "
            f"{format_bytes(36 * TOKENS * HIDDEN * 2)}, and one layer that runs again. It fits, and with AdamW too: "
            f"{format_bytes(found.training.peak.allocated_bytes)}",
        ),
        Claim(
            "FSDP on two GPUs: 68 GB become ~34 GB each",
            "does not hold" if both > 0.6 * peak.allocated_bytes else "holds",
            "it divides parameters, gradients and optimizer state, and every GPU has a sequence of its own: of "
            f"{format_bytes(peak.allocated_bytes)} at least {format_bytes(both)} stay on each",
        ),
        Claim(
            "chunked loss is 5-10% slower",
            "not by arithmetic" if extra_product(TOKENS) < 0.05 else "holds",
            f"computing the logits again is {extra_product(TOKENS):.1%} of the step's operations at {TOKENS:,} tokens "
            f"and {extra_product(4096):.1%} at 4,096; the report's loop computes nothing twice",
        ),
    ]


def placement_claim() -> Claim:
    """The report's second bug: where positions are made."""
    longer = rotary.CACHED + 1
    seen = len(rotary.mismatches(rotary.before(), longer))
    holds = seen and not rotary.mismatches(rotary.before(), rotary.CACHED)
    mended = not rotary.mismatches(rotary.after(), longer) and rotary.same_numbers(longer)
    return Claim(
        "positions made on the CPU stop sequences longer than the cache; device=... mends it",
        "holds" if holds and mended else "does not hold",
        f"with {rotary.CACHED} cached tokens: no finding at {rotary.CACHED}, {seen} at {longer}, none after the fix; "
        "on a CPU the model runs either way, with the same logits",
    )
