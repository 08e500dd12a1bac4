"""Attention scores and masks that exist in memory: their size grows with the square of the sequence length."""

from __future__ import annotations

import math

from memprof.findings import evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, cache_per_context, rule
from memprof.ledger.categories import Category
from memprof.trace.events import Storage, Trace
from memprof.units import GIB, format_bytes

MIN_LENGTH = 256  # shorter sequences have small scores, and are easily taken for head dimensions

MIN_SHARE = 0.05
MIN_BYTES = GIB  # found when above one of the two

_PRODUCTS = {"aten.mm", "aten.bmm", "aten.baddbmm", "aten.addmm", "aten.cat"}
_LINEAR = {"aten.mm", "aten.addmm"}
_IMAGES = ("aten.convolution", "aten.upsample_", "aten.grid_sampler_")  # prefixes of operators that make images
_MASK_DTYPES = {"bool", "uint8", "int64", "int32", "int8"}


@rule(110)
def find(context: Context) -> list[Finding]:
    """Return one finding for scores and masks together; `num_bytes` is their largest sum at one moment."""
    trace, lives = context.ledger.trace, context.lives
    kinds = find_score_storages(context)
    if not kinds:
        return []
    most = lives.find_max_live(kinds)
    peak_bytes = context.ledger.peak_bytes
    if most.num_bytes < MIN_BYTES and most.num_bytes <= MIN_SHARE * peak_bytes:
        return []
    scores = lives.sum_bytes(index for index in most.storages if kinds[index] == "scores")
    masks = most.num_bytes - scores
    largest = trace.storages[max(most.storages, key=lambda index: trace.storages[index].num_bytes)]
    what = "scores" if scores >= masks else "masks"
    shares = f"{format_bytes(scores)} scores, {format_bytes(masks)} masks"
    title = (
        f"Attention {what} of {largest.shape[-2]} x {largest.shape[-1]} are built: "
        f"{evidence.plural(len(most.storages), 'tensor')}, {format_bytes(most.num_bytes)} live at once ({shares}; "
        f"{evidence.percent(most.num_bytes, peak_bytes)} of the peak's size)"
    )
    at_peak = lives.find_live(context.ledger.peak_event, kinds)
    such = evidence.plural(len(at_peak.storages), "such tensor")
    lines = [
        *evidence.tensors_evidence(context, kinds, most.event, kinds.__getitem__),
        Evidence(f"{such} with {format_bytes(at_peak.num_bytes)} live at the peak", num_bytes=at_peak.num_bytes),
    ]
    fixes = evidence.suggest_fixes(context, "attention-scores")
    if any(trace.op(trace.storages[index]) == "aten._safe_softmax" for index in kinds):
        # Only the math path of scaled_dot_product_attention calls this softmax: asking for SDPA again changes nothing.
        lines.append(
            Evidence(
                "scaled_dot_product_attention took its math path: no fused kernel serves these arguments (a bias that "
                "needs a gradient, float32 or an odd head size are the usual reasons)",
                op="aten._safe_softmax",
            )
        )
        fixes = evidence.suggest_fixes(context, "attention-scores of sdpa")
    elif "scores" in kinds.values() and not any(trace.op(trace.storages[index]) in _PRODUCTS for index in kinds):
        # No products of queries and keys, as in a graph attention's sums of two terms: no fused kernel computes these.
        fixes = ()
    return [Finding("attention-scores", Severity.WARNING, title, most.num_bytes, tuple(lines), fixes)]


@cache_per_context
def find_score_storages(context: Context) -> dict[int, str]:
    """Return the storages of shape [..., queries, keys], each with the label "scores" or "mask".

    The shape alone proves nothing: features may be as many as tokens, and images have two equal sizes. Scores require a
    softmax over [queries, keys]; in a program with images of this size, or with layers of as many outputs (a softmax
    over prototypes), they also require as many matrix products. Masks are recognized by their dtype or single head.
    """
    trace = context.ledger.trace
    inputs = evidence.find_input_shapes(context)
    lengths = {shape[-1] for shape in inputs if shape[-1] >= MIN_LENGTH}
    batches = {shape[0] for shape in inputs if len(shape) > 1}
    if context.context_length is not None and context.context_length >= MIN_LENGTH:
        lengths.add(context.context_length)
    words = evidence.find_vocabulary_size(context)
    computes = evidence.mask_compute_phases(trace)
    softmax = [
        "softmax" in op and "log_softmax" not in op and "backward" not in op and "attention" not in op
        for op in trace.ops
    ]
    multiplies, draws = [op in _PRODUCTS for op in trace.ops], [op.startswith(_IMAGES) for op in trace.ops]
    outputs = _find_layer_widths(trace)
    products = {
        math.prod(storage.shape)
        for storage in trace.storages
        if multiplies[storage.op] and computes[storage.phase] and not storage.hidden
    }
    images = {
        storage.shape[-2:]
        for storage, category in zip(trace.storages, context.ledger.categories, strict=True)
        if draws[storage.op] or (category is Category.INPUTS and len(storage.shape) == 4 and storage.dtype != "bool")
    }
    candidates: list[tuple[int, Storage]] = []
    attended: set[tuple[int, ...]] = set()  # of scores: how many there are, queries and keys
    for index, storage in enumerate(trace.storages):
        shape = storage.shape
        if (
            len(shape) < 3
            or shape[-1] < MIN_LENGTH
            or shape[-2] < MIN_LENGTH
            or shape[-1] == words
            or not computes[storage.phase]
            or storage.hidden
            or index in trace.owners
        ):
            continue
        candidates.append((index, storage))
        # A router's softmax over [batch, tokens, experts] has keys that are no sequence length.
        size = math.prod(shape)
        alike = shape[-2:] in images or shape[-1] in outputs
        believed = softmax[storage.op] and (size in products or not alike)
        if believed and (shape[-1] in lengths or shape[-2] == shape[-1]):
            attended.add((size, *shape[-2:]))
    places = {place[1:] for place in attended}
    result: dict[int, str] = {}
    for index, storage in candidates:
        shape = storage.shape
        # [batch, tokens, features] with as many features as tokens is not [batch * heads, queries, keys].
        plain = len(shape) == 3 and shape[0] in batches
        if (math.prod(shape), *shape[-2:]) in attended:
            if not plain or softmax[storage.op]:
                result[index] = "mask" if _is_mask(trace, storage) else "scores"
            continue
        long = len(shape) >= 4 and shape[-2] in lengths and shape[-1] in lengths
        if (long or shape[-2:] in places) and _is_mask(trace, storage):
            result[index] = "mask"
    return result


def _find_layer_widths(trace: Trace) -> set[int]:
    """Return the numbers of columns that products of two matrices have, and that no batched product (scores) has."""
    wide = {storage.shape[-1] for storage in trace.storages if trace.op(storage) in _LINEAR and len(storage.shape) == 2}
    return wide - {storage.shape[-1] for storage in trace.storages if trace.op(storage) in _PRODUCTS - _LINEAR}


def _is_mask(trace: Trace, storage: Storage) -> bool:
    op = trace.op(storage)
    if storage.dtype in _MASK_DTYPES:
        return True
    return len(storage.shape) >= 4 and storage.shape[-3] == 1 and op not in _PRODUCTS and "softmax" not in op
