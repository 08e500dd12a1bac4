"""Rule `vocabulary-larger-than-asked`: the model's factory ignores vocab_size, or uses the size of a tokenizer."""

from __future__ import annotations

from memprof.findings.evidence import format_shape, percent, suggest_fixes, tensor_evidence, vocabulary_tables
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.logits import find_logits_storages
from memprof.ledger.categories import Category
from memprof.trace.events import Role
from memprof.units import format_bytes

TOLERANCE = 128  # words: vocabulary sizes are often padded to a multiple of this, for the GPU's matrix units


@rule(140)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the memory at the peak of all words that were not requested."""
    requested = context.asked_vocab_size
    if requested is None:
        return []
    ledger, lifetimes = context.ledger, context.lifetimes
    trace = ledger.trace
    max_rows = -(-requested // TOLERANCE) * TOLERANCE
    tables = {
        index: name for index, name in vocabulary_tables(trace).items() if trace.storages[index].shape[0] > max_rows
    }
    if not tables:
        return []
    shapes = {trace.storages[index].shape for index in tables}
    rows = max(shape[0] for shape in shapes)
    names = set(tables.values())
    excess: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer state": 0, "logits and loss": 0}
    # Optimizer state is named after its kind (exp_avg), not after its parameter, but has the shape of the parameter.
    for index in lifetimes.at_peak:
        owner = trace.owners.get(index)
        if owner is None:
            continue
        shape, num_bytes = trace.storages[index].shape, trace.storages[index].num_bytes
        if index in tables:
            excess["parameters"] += _compute_excess_bytes(num_bytes, shape[0], requested)
        elif owner.role is Role.GRADIENT and owner.name in names:
            excess["gradients"] += _compute_excess_bytes(num_bytes, shape[0], requested)
        elif owner.role is Role.OPTIMIZER_STATE and shape in shapes:
            excess["optimizer state"] += _compute_excess_bytes(num_bytes, shape[0], requested)
    for index in find_logits_storages(context):
        if index in lifetimes.at_peak:
            storage = trace.storages[index]
            excess[Category.LOGITS_AND_LOSS] += _compute_excess_bytes(storage.num_bytes, storage.shape[-1], requested)
    total = sum(excess.values())
    title = (
        f"Vocabulary of {rows:,} where {requested:,} were requested: {format_bytes(total)} at the peak are words that "
        f"nobody requested ({percent(total, ledger.peak_bytes)})"
    )
    evidence = []
    for index, name in tables.items():
        storage = trace.storages[index]
        table_excess = _compute_excess_bytes(storage.num_bytes, storage.shape[0], requested)
        shape_text, excess_text = format_shape(storage.shape), format_bytes(table_excess)
        text = f"{name} is {shape_text} {storage.dtype}: {excess_text} beyond {requested:,} rows"
        evidence.append(tensor_evidence(trace, index, text, num_bytes=table_excess))
    evidence += [
        Evidence(f"{kind} of the extra words: {format_bytes(num_bytes)} at the peak", num_bytes=num_bytes)
        for kind, num_bytes in excess.items()
        if num_bytes
    ]
    fixes = suggest_fixes(context, "vocabulary-larger-than-asked")
    return [Finding("vocabulary-larger-than-asked", Severity.WARNING, title, total, tuple(evidence), fixes)]


def _compute_excess_bytes(num_bytes: int, rows: int, requested: int) -> int:
    """Return the bytes of all rows after the first `requested`, of a tensor with `rows` rows and `num_bytes`."""
    return num_bytes * max(0, rows - requested) // rows
