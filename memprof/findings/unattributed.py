"""Rule `unattributed`: memory at the peak that belongs to no category."""

from __future__ import annotations

from memprof.findings import evaluation_with_gradients, memory_growth
from memprof.findings.evidence import file_and_line, format_shape, live_evidence, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.units import format_bytes

MIN_SHARE = 0.01  # of the peak: with more unattributed memory, the table of categories is misleading

MAX_SHOWN = 5


@rule(160)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the unattributed memory at the peak, without what other findings name
    because it accumulates."""
    ledger = context.ledger
    others = memory_growth.find_covered_storages(context) | evaluation_with_gradients.find_covered_storages(context)
    tensors = [
        tensor
        for tensor in ledger.live
        if tensor.category is Category.UNATTRIBUTED and others.isdisjoint(tensor.storages)
    ]
    num_bytes = sum(tensor.allocated_bytes for tensor in tensors)
    if num_bytes <= MIN_SHARE * ledger.peak_bytes:
        return []
    tensors.sort(key=lambda tensor: -tensor.allocated_bytes)
    title = f"{format_bytes(num_bytes)} at the peak ({percent(num_bytes, ledger.peak_bytes)}) belong to no category"
    evidence = tuple(_make_tensor_evidence(tensor) for tensor in tensors[:MAX_SHOWN])
    return [Finding("unattributed", Severity.NOTE, title, num_bytes, evidence, ())]


def _make_tensor_evidence(tensor: LiveTensor) -> Evidence:
    if tensor.source is None:
        reason = "made where no line outside torch was running"
    else:
        reason = "made outside every phase that memprof knows and owned by no parameter, buffer, gradient or optimizer"
    text = (
        f"{tensor.count} of {format_shape(tensor.shape)} {tensor.dtype}, {format_bytes(tensor.num_bytes)} each, by "
        f"{tensor.op} at {file_and_line(tensor.source)}: {reason}"
    )
    return live_evidence(tensor, text, num_bytes=tensor.num_bytes)
