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

_FIX = "evaluate in batches as small as those of training, and put the results together on the host"
_FIX_OF_LARGER_SAMPLES = "evaluate at most {} at a time, no larger than a batch of training"


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
    counterparts = [
        index for index in _list_training_inputs(context, inputs) if _is_alike(trace.storages[index], storage)
    ]
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
    samples = plural(max(1, int(storage.shape[0] / times)), "sample")
    title = (
        f"A batch of the evaluation is {format_shape(storage.shape)} ({file_and_line(line)}), one of training "
        f"{usual_shape}; training allocates at most {format_bytes(other_bytes)}"
    )
    evidence = (
        fix_at(line, _FIX if of_one_size else _FIX_OF_LARGER_SAMPLES.format(samples)),
        tensor_evidence(trace, batch, f"in evaluation: {format_shape(storage.shape)} {storage.dtype}"),
        tensor_evidence(trace, usual, f"in training: {usual_shape} {storage.dtype}"),
    )
    severity = Severity.NOTE if ledger.run.fits else Severity.WARNING
    has_room = context.usable_bytes is not None and other_bytes <= context.usable_bytes
    decides = has_room and not ledger.run.fits and not find_kept_storages(context)
    num_bytes = ledger.peak_bytes - other_bytes
    return [Finding("evaluation-batch", severity, title, num_bytes, evidence, (), is_decisive=decides)]


def _is_alike(one: Storage, other: Storage) -> bool:
    """Return whether samples of two batches are alike: equally large, or images of equally many channels."""
    are_images = len(one.shape) == len(other.shape) >= MIN_IMAGE_DIMS and one.shape[1] == other.shape[1]
    return one.dtype == other.dtype and (one.shape[1:] == other.shape[1:] or are_images)


def _list_training_inputs(context: Context, inputs: Iterable[int]) -> list[int]:
    """Return those of `inputs` that are live when a forward of training begins."""
    begins = [time for time, phase in context.phases if phase.kind is PhaseKind.FORWARD and phase.step]
    births, deaths = context.lifetimes.births, context.lifetimes.deaths
    return [
        index
        for index in inputs
        if bisect.bisect_left(begins, births[index]) < bisect.bisect_left(begins, deaths[index])
    ]


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
