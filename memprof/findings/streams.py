"""Rule `streams`: memory reserved because the run uses several CUDA streams, which do not share free blocks."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, format_shape, percent, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.ledger.streams import StreamMemory, StreamShare
from memprof.trace.events import EventKind, Trace
from memprof.units import MIB, format_bytes

MIN_BYTES = 256 * MIB
MIN_SHARE = 0.05  # of reserved memory; the streams must cost this share and MIN_BYTES, unless the run would fit on one

MAX_SHOWN = 4  # streams in the evidence


@rule(85)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is how much less would be reserved if all memory were on one stream.

    Of a run that memory ended, little lets one more allocation succeed alone.
    """
    stream_memory, run = context.streams, context.ledger.run
    if stream_memory is None or len(stream_memory.streams) < 2:
        return []
    saved_bytes, usable_bytes = stream_memory.reserved_bytes - stream_memory.single_stream_bytes, context.usable_bytes
    is_decisive = not run.fits and usable_bytes is not None and stream_memory.single_stream_bytes <= usable_bytes
    is_little = saved_bytes < MIN_BYTES or saved_bytes < MIN_SHARE * stream_memory.reserved_bytes
    if is_little and (context.ledger.trace.ended_out_of_memory or not is_decisive):
        return []
    share = percent(saved_bytes, stream_memory.reserved_bytes)
    title = (
        f"Streams: {format_bytes(saved_bytes)} of the {format_bytes(stream_memory.reserved_bytes)} reserved ({share}) "
        "would not be on one stream: what one has free, no other can use"
    )
    largest = _find_largest_storages(context.ledger.trace)
    largest_shares = sorted(stream_memory.streams, key=lambda share: -share.reserved_bytes)[:MAX_SHOWN]
    evidence = (
        _make_saving_evidence(stream_memory, fits=is_decisive),
        *(_make_stream_evidence(context.ledger.trace, share, largest) for share in largest_shares),
    )
    severity = Severity.WARNING if is_decisive else Severity.NOTE
    return [Finding("streams", severity, title, saved_bytes, evidence, (), is_decisive=is_decisive)]


def _make_saving_evidence(stream_memory: StreamMemory, *, fits: bool) -> Evidence:
    saved_bytes = stream_memory.reserved_bytes - stream_memory.single_stream_bytes
    text = (
        f"with all of it taken on one stream the run reserves {format_bytes(stream_memory.single_stream_bytes)}"
        f"{', and fits' * fits}: take memory before `with torch.cuda.stream(...)`, and use it inside"
    )
    return Evidence(text, saved_bytes)


def _make_stream_evidence(trace: Trace, share: StreamShare, largest: dict[int, int]) -> Evidence:
    """Return evidence of the memory of one stream; `largest` maps a stream to its largest storage."""
    waiting_text = f", {format_bytes(share.waiting_bytes)} waiting for other streams" if share.waiting_bytes else ""
    text = (
        f"{f'stream {share.stream}' if share.stream else 'the default stream'}: {format_bytes(share.reserved_bytes)} "
        f"reserved, {format_bytes(share.free_bytes)} of it free{waiting_text}"
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
    """Return stream -> the largest storage that was allocated on the stream."""
    largest_by_stream: dict[int, int] = {}
    stream, storages = 0, trace.storages
    for kind, ref in trace.events:
        if kind is EventKind.STREAM:
            stream = ref
        elif kind is EventKind.ALLOC and storages[ref].device == trace.device:
            previous = largest_by_stream.get(stream)
            if previous is None or storages[ref].num_bytes > storages[previous].num_bytes:
                largest_by_stream[stream] = ref
    return largest_by_stream
