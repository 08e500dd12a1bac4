"""Rule `attention-scores`: materialized attention scores and masks, whose size is quadratic in sequence length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from memprof.findings import evidence
from memprof.findings.evidence import find_call_at
from memprof.findings.finding import Context, Evidence, Finding, Severity, cache_per_context, rule
from memprof.findings.suggestions import list_fix_names, suggest_against
from memprof.ledger.categories import Category
from memprof.trace.events import NONE, Forward, Storage, Trace
from memprof.units import GIB, format_bytes

MIN_LENGTH = 256  # shorter sequences have small scores, and a length may equal a head dimension

MIN_SHARE = 0.05  # of the peak; reported if scores and masks take more than this share, or MIN_BYTES
MIN_BYTES = GIB

MIN_LAYERS = 3  # whose scores a call keeps: those of one may still be in use where the next begins

PRODUCTS = {"aten.mm", "aten.bmm", "aten.baddbmm", "aten.addmm", "aten.cat"}
_LINEAR = {"aten.mm", "aten.addmm"}
_BATCHED_PRODUCTS = {"aten.bmm", "aten.baddbmm"}
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_IMAGE_OPS = ("aten.convolution", "aten.upsample_", "aten.grid_sampler_")  # prefixes of operators that make images
_MASK_DTYPES = {"bool", "uint8", "int64", "int32", "int8"}


@rule(110)
def find(context: Context) -> list[Finding]:
    """Return one finding for scores and masks together; `num_bytes`: maximum of the bytes that are live at once."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    labels = find_score_storages(context)
    if not labels:
        return []
    max_live = lifetimes.find_max_live(labels)
    peak_bytes = context.ledger.peak_bytes
    if max_live.num_bytes < MIN_BYTES and max_live.num_bytes <= MIN_SHARE * peak_bytes:
        return []
    score_bytes = lifetimes.sum_bytes(index for index in max_live.storages if labels[index] == "scores")
    mask_bytes = max_live.num_bytes - score_bytes
    largest = trace.storages[max(max_live.storages, key=lambda index: trace.storages[index].num_bytes)]
    main_kind = "scores" if score_bytes >= mask_bytes else "masks"
    line = evidence.find_own_line(trace, min(labels))
    place = "" if context.spec is not None else f" at {evidence.file_and_line(line)}"
    at_peak = lifetimes.find_live(context.ledger.peak_event, labels)
    share = f"{evidence.percent(max_live.num_bytes, peak_bytes)} of the peak"
    share += "'s size" * (at_peak.num_bytes < max_live.num_bytes)
    both = (
        f"{format_bytes(score_bytes)} scores, {format_bytes(mask_bytes)} masks; " if score_bytes and mask_bytes else ""
    )
    title = (
        f"Attention {main_kind} of {largest.shape[-2]} x {largest.shape[-1]} are built{place}: "
        f"{evidence.plural(len(max_live.storages), 'tensor')}, {format_bytes(max_live.num_bytes)} live at once "
        f"({both}{share})"
    )
    call = find_call_that_returns_scores(context)
    if call is not None:
        line = evidence.file_and_line(trace.source_at(call.source))
        title += f"; the call at {line} has no gradients, and keeps those of each layer to return them"
    count_text = evidence.plural(len(at_peak.storages), "such tensor")
    lines = [
        *evidence.tensors_evidence(context, labels, max_live.event, labels.__getitem__),
        Evidence(f"{count_text} with {format_bytes(at_peak.num_bytes)} live at the peak", num_bytes=at_peak.num_bytes),
    ]
    found = suggest_against(context, "attention-scores")
    if any(trace.op(trace.storages[index]) == "aten._safe_softmax" for index in labels):
        # Only the math backend of scaled_dot_product_attention calls this softmax: the program uses SDPA already.
        lines.append(
            Evidence(
                "scaled_dot_product_attention took its math path: no fused kernel serves these arguments (a bias that "
                "needs a gradient, float32 or an odd head size are the usual reasons)",
                op="aten._safe_softmax",
            )
        )
    fixes, num_bytes = list_fix_names(found), max_live.num_bytes
    return [Finding("attention-scores", Severity.WARNING, title, num_bytes, tuple(lines), fixes, suggestions=found)]


def find_call_that_returns_scores(context: Context) -> Forward | None:
    """Return the call without gradients that the peak is in, if scores of several layers are live there: nothing but
    its result keeps them (`output_attentions=True`)."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    call = find_call_at(trace, context.ledger.peak_event)
    if call is None or call.nodes:
        return None
    scores = [index for index, label in find_score_storages(context).items() if label == "scores"]
    own = [index for index in lifetimes.at_peak.intersection(scores) if lifetimes.births[index] >= call.begin]
    return call if len({trace.storages[index].module for index in own}) >= MIN_LAYERS else None


@cache_per_context
def find_score_storages(context: Context) -> dict[int, str]:
    """Return storage -> "scores" or "mask", for attention tensors of shape [..., queries, keys].

    The shape alone is ambiguous: features may be as many as tokens, and images are square. So scores require a softmax
    of this shape and, if images or the outputs of linear layers have such sizes, also a matrix product with as many
    elements. Masks are recognized by their dtype, or by a head dimension of 1.
    """
    trace = context.ledger.trace
    input_shapes = evidence.find_input_shapes(context)
    lengths = {context.context_length, *(shape[-1] for shape in input_shapes)}
    batches = {shape[0] for shape in input_shapes if len(shape) > 1}
    vocabulary_size = evidence.vocab_size_of(context)
    is_compute_phase = evidence.mask_compute_phases(trace)
    is_softmax = [
        "softmax" in op and "log_softmax" not in op and "backward" not in op and "attention" not in op
        for op in trace.ops
    ]
    is_product_op, is_image = [op in PRODUCTS for op in trace.ops], [op.startswith(_IMAGE_OPS) for op in trace.ops]
    layer_widths = _find_layer_widths(trace)
    product_sizes = {
        math.prod(storage.shape)
        for storage in trace.storages
        if is_product_op[storage.op] and is_compute_phase[storage.phase] and not storage.hidden
    }
    image_sizes = {
        storage.shape[-2:]
        for storage, category in zip(trace.storages, context.ledger.categories, strict=True)
        if is_image[storage.op] or (category is Category.INPUTS and len(storage.shape) == 4 and storage.dtype != "bool")
    }
    candidates: list[tuple[int, Storage]] = []
    score_shapes: set[tuple[int, ...]] = set()  # number of elements, queries, keys
    for index, storage in enumerate(trace.storages):
        shape = storage.shape
        if (
            len(shape) < 3
            or shape[-1] < MIN_LENGTH
            or shape[-2] < MIN_LENGTH
            or shape[-1] == vocabulary_size
            or not is_compute_phase[storage.phase]
            or storage.hidden
            or index in trace.owners
        ):
            continue
        candidates.append((index, storage))
        # A router's softmax over [batch, tokens, experts] has keys that are no sequence length.
        size = math.prod(shape)
        is_ambiguous = shape[-2:] in image_sizes or shape[-1] in layer_widths
        is_score = is_softmax[storage.op] and (size in product_sizes or not is_ambiguous)
        if is_score and (shape[-1] in lengths or shape[-2] == shape[-1]):
            score_shapes.add((size, *shape[-2:]))
    score_shapes |= _find_unfinished(context, candidates)
    query_key_shapes = {score_shape[1:] for score_shape in score_shapes}
    labels: dict[int, str] = {}
    for index, storage in candidates:
        shape = storage.shape
        # [batch, tokens, features] with as many features as tokens is not [batch * heads, queries, keys].
        may_be_features = len(shape) == 3 and shape[0] in batches
        if (math.prod(shape), *shape[-2:]) in score_shapes:
            if not may_be_features or is_softmax[storage.op]:
                labels[index] = "mask" if _is_mask(trace, storage) else "scores"
            continue
        has_known_lengths = len(shape) >= 4 and shape[-2] in lengths and shape[-1] in lengths
        if (has_known_lengths or shape[-2:] in query_key_shapes) and _is_mask(trace, storage):
            labels[index] = "mask"
    return labels


def _find_unfinished(context: Context, candidates: Iterable[tuple[int, Storage]]) -> set[tuple[int, ...]]:
    """Return the shapes of square products, or what is made of them, that memory ran out in, before their softmax, in a
    module that has attention in the name of its class."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    if oom is None or not trace.ended_out_of_memory:
        return set()
    failed = trace.storages[oom.storage]
    if failed.module == NONE or not _ATTENTION.search(trace.modules[failed.module].class_name):
        return set()
    products: set[tuple[int, ...]] = {
        (math.prod(storage.shape), *storage.shape[-2:])
        for _, storage in candidates
        if trace.op(storage) in _BATCHED_PRODUCTS and storage.module == failed.module
    }
    shape = (math.prod(failed.shape), *failed.shape[-2:])
    return products & {shape} if shape[-1] == shape[-2] else set()


def _find_layer_widths(trace: Trace) -> set[int]:
    """Return the output widths of linear layers: columns of 2-D matrix products, if no batched product has as many."""
    widths = {s.shape[-1] for s in trace.storages if trace.op(s) in _LINEAR and len(s.shape) == 2}
    return widths - {s.shape[-1] for s in trace.storages if trace.op(s) in PRODUCTS - _LINEAR}


def _is_mask(trace: Trace, storage: Storage) -> bool:
    op = trace.op(storage)
    if storage.dtype in _MASK_DTYPES:
        return True
    return len(storage.shape) >= 4 and storage.shape[-3] == 1 and op not in PRODUCTS and "softmax" not in op
