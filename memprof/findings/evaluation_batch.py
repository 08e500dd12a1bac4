"""Rule `evaluation-batch`: an evaluation that decides the peak is given a larger batch than training is."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable

from memprof.findings.evaluation_accumulates import find_kept_storages
from memprof.findings.evidence import file_and_line, format_shape, plural, tensor_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import fix_at, is_large
from memprof.findings.larger_batch import MIN_TIMES
from memprof.trace.events import PhaseKind, Role, Storage
from memprof.units import format_bytes

MIN_IMAGE_DIMS = 4  # of a batch of images, which may be cropped in training
MIN_SEQUENCE_DIMS = 3  # of a batch of sequences of features or frames, which may be shorter in training

_FIX = "evaluate in batches as small as those of training, and put the results together on the host"
_FIX_OF_LARGER_SAMPLES = "evaluate at most {} at a time, no larger than a batch of training"
_FIX_OF_LONGER_SAMPLES = "evaluate each in slices of at most {:,} of its {:,} along dimension 1, as many as in training"
_FIX_OF_LARGER_IMAGES = "evaluate each image in tiles, no larger than a batch of training, or make it smaller"


@rule(59)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the peak minus the most bytes outside evaluations.

    It is decisive if memory has room for these, unless outputs of the evaluation pile up.
    """
    ledger, trace, lifetimes = context.ledger, context.ledger.trace, context.lifetimes
    begins = [time for time, _ in context.phases]
    moment = bisect.bisect_right(begins, ledger.peak_event) - 1
    trains = any(phase.kind is PhaseKind.OPTIMIZER_STEP for _, phase in context.phases)
    if context.spec is not None or not trains or moment < 0:
        return []
    if context.phases[moment][1].kind is not PhaseKind.EVALUATION:
        return []
    inputs = [
        index for index, owner in trace.owners.items() if owner.role is Role.INPUT and trace.storages[index].shape
    ]
    given = lifetimes.find_live(begins[moment], inputs).storages
    batch = max(given, key=lambda index: trace.storages[index].num_bytes, default=None)
    if batch is None or lifetimes.deaths[batch] <= ledger.peak_event:  # what comes after the batch decides the peak
        return []
    storage = trace.storages[batch]
    alike = [index for index in inputs if _is_alike(trace.storages[index], storage)]
    counterparts = _list_training_inputs(context, alike)
    if not counterparts:
        return []
    of_one_size = [index for index in counterparts if trace.storages[index].shape[1:] == storage.shape[1:]]
    counterparts = of_one_size or counterparts
    usual = statistics.median_low((trace.storages[index].num_bytes, index) for index in counterparts)[1]
    times = storage.num_bytes / max(1, trace.storages[usual].num_bytes)
    other_bytes = _find_peak_outside_evaluations(context)
    if times < MIN_TIMES or not is_large(context, ledger.peak_bytes - other_bytes):
        return []
    line, usual_shape = trace.source_line(storage), format_shape(trace.storages[usual].shape)
    title = (
        f"A batch of the evaluation is {format_shape(storage.shape)} ({file_and_line(line)}), one of training "
        f"{usual_shape}; training allocates at most {format_bytes(other_bytes)}"
    )
    evidence = (
        fix_at(line, _FIX if of_one_size else _describe_fix(storage, trace.storages[usual])),
        tensor_evidence(trace, batch, f"in evaluation: {format_shape(storage.shape)} {storage.dtype}"),
        tensor_evidence(trace, usual, f"in training: {usual_shape} {storage.dtype}"),
    )
    severity = Severity.NOTE if ledger.run.fits else Severity.WARNING
    has_room = context.usable_bytes is not None and other_bytes <= context.usable_bytes
    decides = has_room and not ledger.run.fits and not find_kept_storages(context)
    num_bytes = ledger.peak_bytes - other_bytes
    return [Finding("evaluation-batch", severity, title, num_bytes, evidence, (), is_decisive=decides)]


def _is_alike(one: Storage, other: Storage) -> bool:
    """Return whether samples of two batches are alike: equally large, or images of equally many channels, or sequences
    of features that are equally large."""
    num_dims = len(one.shape)
    if one.dtype != other.dtype or num_dims != len(other.shape):
        return False
    are_images = num_dims >= MIN_IMAGE_DIMS and one.shape[1] == other.shape[1]
    return one.shape[1:] == other.shape[1:] or are_images or _are_sequences(one, other)


def _are_sequences(one: Storage, other: Storage) -> bool:
    """Return whether two batches have sequences whose features are equally large."""
    return len(one.shape) >= MIN_SEQUENCE_DIMS and one.shape[2:] == other.shape[2:]


def _describe_fix(batch: Storage, usual: Storage) -> str:
    """Return the change of an evaluation's `batch` of larger samples, which makes it as large as the `usual` one."""
    samples = batch.shape[0] * usual.num_bytes // batch.num_bytes
    if samples:
        return _FIX_OF_LARGER_SAMPLES.format(plural(samples, "sample"))
    if not _are_sequences(batch, usual):
        return _FIX_OF_LARGER_IMAGES
    length = max(1, batch.shape[0] * batch.shape[1] * usual.num_bytes // batch.num_bytes)
    return _FIX_OF_LONGER_SAMPLES.format(length, batch.shape[1])


def _list_training_inputs(context: Context, inputs: Iterable[int]) -> list[int]:
    """Return the largest of `inputs` that are live when a forward of training begins, by the forward."""
    begins = [time for time, phase in context.phases if phase.kind is PhaseKind.FORWARD and phase.step]
    births, deaths, storages = context.lifetimes.births, context.lifetimes.deaths, context.ledger.trace.storages
    largest: dict[int, int] = {}  # of several images of one sample
    for index in inputs:
        forward = bisect.bisect_left(begins, births[index])
        if forward < bisect.bisect_left(begins, deaths[index]):
            best = largest.get(forward, index)
            largest[forward] = index if storages[index].num_bytes > storages[best].num_bytes else best
    return list(largest.values())


def _find_peak_outside_evaluations(context: Context) -> int:
    """Return the most bytes that are allocated while the program does not evaluate, and before an error ends it."""
    allocated, phases, oom = context.ledger.allocated, context.phases, context.ledger.out_of_memory
    last_event = oom.event if oom is not None and context.ledger.trace.ended_out_of_memory else len(allocated)
    ends = [time for time, _ in phases[1:]] + [len(allocated)]
    spans = (
        allocated[begin:end]
        for (begin, phase), end in zip(phases, ends, strict=True)
        if phase.kind is not PhaseKind.EVALUATION and begin <= last_event
    )
    return max((max(span, default=0) for span in spans), default=0)
