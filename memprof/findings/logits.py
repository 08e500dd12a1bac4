"""Rule `logits-explosion`: several tensors [tokens x vocabulary], in several precisions, are live at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from memprof.findings import evidence
from memprof.findings.evaluation_accumulates import find_kept_storages
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.growth import find_growing_storages
from memprof.findings.suggestions import list_fix_names, suggest_against
from memprof.ledger.categories import is_half_precision_copy
from memprof.trace.events import Storage, Trace
from memprof.units import GIB, format_bytes

MIN_SHARE = 0.10  # of the run's peak: smaller logits do not decide whether the run fits

MIN_BYTES = GIB  # smaller logits matter on no current GPU

MAX_KINDS = 4  # in the title, of which the last stands for all others

MIN_KIND_SHARE = 0.05  # of the logits: smaller kinds, such as one chunk of them, are not named

_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear", "aten.matmul"}
_COPIES = {"aten.clone", "aten.copy", "aten.contiguous", "aten.constant_pad_nd", "aten.slice_copy"}


@rule(100)
def find(context: Context) -> list[Finding]:
    """Return one finding for all copies of the logits; `num_bytes`: maximum of the bytes that are live at once."""
    copies = find_step_logits(context)
    if not copies:
        return []
    ledger, lifetimes = context.ledger, context.lifetimes
    most = lifetimes.find_max_live(copies)
    if most.num_bytes <= MIN_BYTES or most.num_bytes <= MIN_SHARE * ledger.peak_bytes:
        return []
    trace = ledger.trace
    at_peak = lifetimes.find_live(ledger.peak_event, copies)
    largest = trace.storages[max(most.storages, key=lambda index: trace.storages[index].num_bytes)]
    shape_2d = (math.prod(largest.shape[:-1]), largest.shape[-1])
    share = evidence.percent(most.num_bytes, ledger.peak_bytes)
    if at_peak.num_bytes == most.num_bytes:
        comparison = f"{share} of the peak"
    elif at_peak.num_bytes:
        comparison = f"{share} of the peak's size; {format_bytes(at_peak.num_bytes)} of it live at the peak"
    else:
        comparison = f"{share} of the peak's size; none live at the peak"
    shape_text = evidence.format_shape(shape_2d)
    if len({math.prod(trace.storages[index].shape) for index in most.storages}) > 1:  # such as chunks of the others
        shape_text = f"up to {shape_text}"
    line = evidence.find_own_line(trace, find_first_logits(trace, copies))
    first = min(most.storages)  # storages are in order of birth: what calls before that made is no loss of these
    losses = (index for index in copies if index > first and trace.op(trace.storages[index]) == "aten._log_softmax")
    loss_line = next((evidence.find_own_line(trace, index) for index in losses), line)
    loss = "" if loss_line == line else f", with a log_softmax at {evidence.file_and_line(loss_line)}"
    place = "" if context.spec is not None else f", made at {evidence.file_and_line(line)}{loss}"
    kinds = _name_kinds(trace, most.storages)
    title = f"Logits: {format_bytes(most.num_bytes)} live at once ({comparison}): {kinds} of {shape_text}{place}"
    rest = ledger.peak_bytes - at_peak.num_bytes
    count_text = evidence.plural(len(at_peak.storages), "logits tensor")
    summary = Evidence(
        f"{count_text} with {format_bytes(at_peak.num_bytes)} live at the peak "
        f"({evidence.percent(at_peak.num_bytes, ledger.peak_bytes)}); everything else there takes {format_bytes(rest)}",
        num_bytes=at_peak.num_bytes,
    )
    lines = evidence.tensors_evidence(context, copies, most.event, lambda index: describe(trace, trace.storages[index]))
    found = suggest_against(context, "logits-explosion")
    fixes, lines = list_fix_names(found), (*lines, summary)
    return [Finding("logits-explosion", Severity.WARNING, title, most.num_bytes, lines, fixes, suggestions=found)]


def _name_kinds(trace: Trace, storages: Iterable[int]) -> str:
    """Return what the copies of the logits `storages` are, most bytes first, each large kind with its number."""
    counts, sizes = Counter[str](), Counter[str]()
    for index in storages:
        kind = describe(trace, trace.storages[index])
        counts[kind] += 1
        sizes[kind] += trace.storages[index].num_bytes
    large = [kind for kind, num_bytes in sizes.most_common() if num_bytes >= MIN_KIND_SHARE * sizes.total()]
    names = [f"{kind} ({counts[kind]} times)" if counts[kind] > 1 else kind for kind in large]
    if len(names) > MAX_KINDS:
        names[MAX_KINDS - 1 :] = [f"{len(names) - MAX_KINDS + 1} others"]
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def find_step_logits(context: Context) -> list[int]:
    """Return the storages of `find_logits_storages` without those that pile up over the steps, which are a leak, or
    over calls without gradients, whose finding names what keeps them."""
    piled_up = find_growing_storages(context) | find_kept_storages(context)
    return [index for index in find_logits_storages(context) if index not in piled_up]


def find_logits_storages(context: Context) -> list[int]:
    """Return the storages with one value per word of the vocabulary: logits, casts, log-softmax, their gradients.

    They are recognized by their last dimension. A head [features x vocabulary] has this last dimension too: storages
    with an owner or with the shape of a parameter are excluded.
    """
    vocabulary_size = evidence.vocab_size_of(context)
    if vocabulary_size is None:
        return []
    trace = context.ledger.trace
    is_compute_phase = evidence.mask_compute_phases(trace)
    parameter_shapes = {trace.storages[index].shape for index in evidence.param_names(trace)}
    return [
        index
        for index, storage in enumerate(trace.storages)
        if storage.shape
        and storage.shape[-1] == vocabulary_size
        and len(storage.shape) > 1
        and is_compute_phase[storage.phase]
        and storage.shape not in parameter_shapes
        and not (trace.op(storage) == "aten._to_copy" and is_half_precision_copy(storage, parameter_shapes))
        and index not in trace.owners
        and not storage.hidden
    ]


def find_first_logits(trace: Trace, copies: list[int]) -> int:
    """Return the storage that `copies` of logits are copies of: the first of those that a matrix product has made."""
    return next((index for index in copies if trace.op(trace.storages[index]) in _PRODUCTS), copies[0])


def describe(trace: Trace, storage: Storage) -> str:
    """Return a description of `storage`, a copy of the logits, from the operator that allocated it."""
    op = trace.op(storage)
    if evidence.is_forward(trace, storage):
        if "log_softmax" in op:
            return "log-softmax"
        if "softmax" in op:
            return "softmax"
        if op in _PRODUCTS:
            return "logits"
        if op == "aten._to_copy":
            return "float32 upcast" if storage.dtype == "float32" else f"cast to {storage.dtype}"
        if op in _COPIES:
            return "contiguous copy of the logits"
        return f"{op.removeprefix('aten.')} of the logits"
    if "nll_loss" in op:
        return "gradient of the log-softmax"
    if "softmax_backward" in op:
        return "gradient of the log-softmax's input"
    if op == "aten._to_copy":
        is_half = storage.dtype in evidence.HALF_DTYPES
        return "gradient of the half-precision logits" if is_half else "gradient of the logits, upcast"
    return "gradient of the logits"
