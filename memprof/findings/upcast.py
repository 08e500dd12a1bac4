"""Rule `float32-upcast`: half-precision models that copy activations to float32, which takes twice the bytes."""

from __future__ import annotations

from collections import defaultdict

from memprof.findings.attention_scores import find_score_storages
from memprof.findings.evidence import file_and_line, find_half, is_forward, percent, tensors_evidence, vocab_size_of
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.ledger.categories import Category
from memprof.trace.events import NONE, ModuleRole, Storage, Trace
from memprof.units import GIB, format_bytes

MIN_BYTES = GIB
MIN_SHARE = 0.05  # of the peak; the copies of a line that are live at once must take this share, or MIN_BYTES


@rule(120)
def find(context: Context) -> list[Finding]:
    """Return one finding per source line; `num_bytes` is the maximum of the bytes of its copies that are live at once.

    A trace does not record the dtypes of an operator's inputs: a float32 tensor that `aten._to_copy` makes in a forward
    pass of a model with half-precision parameters counts as an upcast. The rules `logits-explosion` and
    `attention-scores` report logits and attention scores.
    """
    half_dtype = find_half(context)
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if half_dtype is None or "aten._to_copy" not in trace.ops:
        return []
    copy_op = trace.ops.index("aten._to_copy")
    vocabulary_size = vocab_size_of(context)
    scores = find_score_storages(context)
    by_line: dict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if (
            storage.op == copy_op
            and storage.dtype == "float32"
            and is_forward(trace, storage)
            and index not in trace.owners
            and index not in scores
            and context.ledger.categories[index] is not Category.LOGITS_AND_LOSS
            and storage.shape[-1:] != (vocabulary_size,)
        ):
            by_line[storage.source].append(index)
    findings = []
    peak_bytes = context.ledger.peak_bytes
    for source, indices in by_line.items():
        max_live = lifetimes.find_max_live(indices)
        if max_live.num_bytes < MIN_BYTES and max_live.num_bytes < MIN_SHARE * peak_bytes:
            continue
        in_norms = all(_is_in_norm(trace, trace.storages[index]) for index in indices)
        norm_text = "; the model's own numerics: its norms compute in float32" if in_norms else ""
        line = file_and_line(trace.source_at(source))
        at_peak = lifetimes.find_live(context.ledger.peak_event, indices)
        title = (
            f"{half_dtype} activations copied to float32 at {line}: {format_bytes(max_live.num_bytes)} live at once, "
            f"{format_bytes(at_peak.num_bytes)} at the peak ({percent(at_peak.num_bytes, peak_bytes)}){norm_text}"
        )
        lines = tensors_evidence(context, indices, max_live.event, lambda index: "float32 copy")
        severity = Severity.NOTE if in_norms else Severity.WARNING
        findings.append(Finding("float32-upcast", severity, title, max_live.num_bytes, lines, ()))
    return findings


def _is_in_norm(trace: Trace, storage: Storage) -> bool:
    if storage.module == NONE:
        return False
    module = trace.modules[storage.module]
    return module.role is ModuleRole.NORM or "norm" in module.class_name.lower()
