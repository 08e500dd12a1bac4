"""Rule `column-with-row`: [N, 1] with [N] makes [N, N], where mostly N numbers were meant.

So does [N, 1, 1] with [N, 1] make [N, N, 1].
"""

from __future__ import annotations

from memprof.findings.effect import compute_needs_of, format_reserved, is_decisive
from memprof.findings.evidence import file_and_line, format_shape, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import fix_at, is_large
from memprof.findings.lifetimes import Saving
from memprof.ledger.what_if import resize


@rule(95)
def find(context: Context) -> list[Finding]:
    """Return at most one finding, of the largest such tensor; `num_bytes` is the reduction of the peak with N numbers.

    Of matrices it is not decisive even if the run fits then: all pairs may be meant.
    """
    trace, lifetimes, run = context.ledger.trace, context.lifetimes, context.ledger.run
    made = [index for index in trace.column_broadcasts if trace.storages[index].device == trace.device]
    if not made:
        return []
    largest = max(made, key=lambda index: trace.storages[index].num_bytes)
    shapes = {trace.storages[index].shape for index in made}
    pairs = [
        index
        for index, storage in enumerate(trace.storages)
        if storage.shape in shapes and index >= made[0] and index not in trace.owners
    ]
    sizes = {index: trace.storages[index].num_bytes // trace.storages[index].shape[0] for index in pairs}
    num_bytes = lifetimes.peak_reduction(
        [
            Saving(lifetimes.births[index], lifetimes.deaths[index], trace.storages[index].num_bytes - sizes[index])
            for index in pairs
            if trace.storages[index].device == trace.device
        ]
    )
    if not is_large(context, num_bytes):
        return []
    needs = compute_needs_of(context, resize(trace, sizes))
    storage = trace.storages[largest]
    (length, _, *ones), line = storage.shape, trace.source_line(storage)
    column, row, pairs_text = (
        format_shape((length, 1, *ones)),
        format_shape((length, *ones)),
        format_shape(storage.shape),
    )
    decides, squeeze = is_decisive(context, needs), "squeeze(-1)" if ones else "squeeze(1)"
    title = f"{column} with {row} makes {pairs_text} at {file_and_line(line)}: if that was not meant, {squeeze}"
    evidence = (
        fix_at(line, f"if {pairs_text} was not meant: {squeeze} on {column}"),
        Evidence(f"the run {format_reserved(needs, run.required_reserved_bytes)}", num_bytes=num_bytes),
        tensor_evidence(trace, largest, f"{trace.op(storage)} at {file_and_line(line)}"),
    )
    return [
        Finding("column-with-row", Severity.WARNING, title, num_bytes, evidence, (), is_decisive=decides and bool(ones))
    ]
