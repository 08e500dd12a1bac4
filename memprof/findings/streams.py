"""Memory that is reserved because the run uses several streams, which cannot reuse each other's free blocks."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, format_shape, percent, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.ledger.streams import StreamMemory, StreamShare
from memprof.trace.events import EventKind, Trace
from memprof.units import MIB, format_bytes

MIN_BYTES = 256 * MIB
MIN_SHARE = 0.05  # found when the streams cost at least both, and always when the run would fit on one

MAX_SHOWN = 4  # streams in the evidence


@rule(85)
def find(context: Context) -> list[Finding]:
    """Return a finding for streams; `num_bytes` is the reduction of reserved memory with all memory on one stream."""
    found, run = context.streams, context.ledger.run
    if found is None or len(found.streams) < 2:
        return []
    cost, usable = found.reserved_bytes - found.single_stream_bytes, context.usable_bytes
    decides = not run.fits and usable is not None and found.single_stream_bytes <= usable
    if not decides and (cost < MIN_BYTES or cost < MIN_SHARE * found.reserved_bytes):
        return []
    title = (
        f"Streams: {format_bytes(cost)} of the {format_bytes(found.reserved_bytes)} reserved "
        f"({percent(cost, found.reserved_bytes)}) would not be on one stream: what one has free, no other can use"
    )
    largest = _find_largest_storages(context.ledger.trace)
    most = sorted(found.streams, key=lambda share: -share.reserved_bytes)[:MAX_SHOWN]
    evidence = (
        _make_saving_evidence(found, fits=decides),
        *(_make_stream_evidence(context.ledger.trace, one, largest) for one in most),
    )
    severity = Severity.WARNING if decides else Severity.NOTE
    return [Finding("streams", severity, title, cost, evidence, ())]


def _make_saving_evidence(found: StreamMemory, *, fits: bool) -> Evidence:
    saved = found.reserved_bytes - found.single_stream_bytes
    text = (
        f"with all of it taken on one stream the run reserves {format_bytes(found.single_stream_bytes)}"
        f"{', and fits' * fits}: take memory before `with torch.cuda.stream(...)`, and use it inside"
    )
    return Evidence(text, saved)


def _make_stream_evidence(trace: Trace, share: StreamShare, largest: dict[int, int]) -> Evidence:
    """Return evidence of one stream, with the largest tensor that was allocated on it."""
    waits = f", {format_bytes(share.waiting_bytes)} waiting for other streams" if share.waiting_bytes else ""
    text = (
        f"{f'stream {share.stream}' if share.stream else 'the default stream'}: {format_bytes(share.reserved_bytes)} "
        f"reserved, {format_bytes(share.free_bytes)} of it free{waits}"
    )
    index = largest.get(share.stream)
    if index is None:
        return Evidence(text, share.reserved_bytes)
    storage = trace.storages[index]
    text += (
        f"; its largest tensor is {format_shape(storage.shape)} {storage.dtype} of {trace.op(storage)} at "
        f"{file_and_line(trace.source_line(storage))}"
    )
    return tensor_evidence(trace, index, text, num_bytes=share.reserved_bytes)


def _find_largest_storages(trace: Trace) -> dict[int, int]:
    """Return the largest storage that was allocated on each stream."""
    found: dict[int, int] = {}
    stream, storages = 0, trace.storages
    for kind, ref in trace.events:
        if kind is EventKind.STREAM:
            stream = ref
        elif kind is EventKind.ALLOC and storages[ref].device == trace.device:
            known = found.get(stream)
            if known is None or storages[ref].num_bytes > storages[known].num_bytes:
                found[stream] = ref
    return found
