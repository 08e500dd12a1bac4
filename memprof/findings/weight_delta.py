"""A whole weight matrix for every token: what einsum('bsr,dr,rf->bsdf') builds (448 GiB at 4 x 512, 4096 x 14336)."""

from __future__ import annotations

import math

from memprof.findings.attention_scores import score_storages
from memprof.findings.evidence import (
    computing,
    feature_maps,
    file_and_line,
    format_shape,
    module_pattern,
    parameters,
    percent,
    plural,
    tensors_evidence,
    token_counts,
    vocabulary,
    would_help,
)
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.units import GIB, format_bytes

MIN_DIM = 256
"""Smaller matrices are heads, ranks and states: an activation that is [tokens x 64 x 64] is nothing odd."""

MIN_TOKENS = 16
"""With fewer, a matrix for each token is a matrix for each sequence or expert: the remedy, not the problem."""

MIN_BYTES = GIB
MIN_SHARE = 0.05
"""It is found when it takes more than one of these two."""


@rule(90, decides=True)
def find(context: Context) -> list[Finding]:
    """One finding for all such tensors; `num_bytes` is their largest sum at one moment."""
    matches = _matches(context)
    if not matches:
        return []
    ledger, lives = context.ledger, context.lives
    most = lives.most(matches)
    if most.num_bytes < MIN_BYTES and most.num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    trace = ledger.trace
    # The forward tensor that was made first is the line to change; the others follow from it.
    first = min(most.storages, key=lambda index: lives.births[index])
    storage = trace.storages[first]
    tokens, rows, columns = matches[first]
    module = module_pattern(trace, storage)
    inside = f" in {module}" if module else ""
    title = (
        f"A {rows} x {columns} weight delta for each of {tokens} tokens: {format_bytes(storage.num_bytes)} at "
        f"{file_and_line(trace.source_line(storage))}{inside}, {plural(len(most.storages), 'such tensor')} with "
        f"{format_bytes(most.num_bytes)} alive at once ({percent(most.num_bytes, ledger.peak_bytes)} of the peak)"
    )

    def label(index: int) -> str:
        tokens, rows, columns = matches[index]
        return f"{tokens} tokens x {format_shape((rows, columns))}"

    lines = tensors_evidence(context, matches, most.event, label)
    remedies = would_help(context, "weight-delta-per-token")
    return [Finding("weight-delta-per-token", Severity.WARNING, title, most.num_bytes, lines, remedies)]


def _matches(context: Context) -> dict[int, tuple[int, int, int]]:
    """Storages that hold a matrix for each token: tokens, rows and columns, by storage.

    The matrix is [d x f] with d and f dimensions of parameters, and d before f as one of three layouts that einsum and
    bmm give: [..., d, f], [..., tokens * d, f] or, if [d x f] is a parameter's own shape, [tokens, d * f]. Kept out:
    features of a batch's tokens, or of a chunk of them (a smaller input may divide their number by a width), tensors
    as large as a parameter (gradients of experts, casts of weights), logits, S x S scores, and maps of images.
    """
    trace = context.ledger.trace
    owned = parameters(trace)
    sizes: set[int] = set()
    matrices: set[tuple[int, int]] = set()
    weights: set[int] = set()
    for index in owned:
        shape = trace.storages[index].shape
        weights.add(math.prod(shape))
        sizes.update(size for size in shape if size >= MIN_DIM)
        if len(shape) >= 2 and min(shape[-2:]) >= MIN_DIM:
            matrices |= {(shape[-2], shape[-1]), (shape[-1], shape[-2])}
    products = {rows * columns: (rows, columns) for rows, columns in matrices}
    words = vocabulary(context)
    sizes.discard(words or 0)
    counts = {count for count in token_counts(context) if count >= MIN_TOKENS}
    maps = feature_maps(trace)
    lengths = {context.context_length} if context.context_length else set()
    computes = computing(trace)
    result: dict[int, tuple[int, int, int]] = {}
    for index, storage in enumerate(trace.storages):
        shape = storage.shape
        if (
            len(shape) < 2
            or not computes[storage.phase]
            or shape[-1] < MIN_DIM
            or storage.hidden
            or index in trace.owners
            or shape[-1] == words
            or shape[-2:] in maps
        ):
            continue
        *leading, rows, columns = shape
        found = None
        before_last = math.prod(shape[:-1])
        if columns in sizes and all(count % before_last for count in counts):
            tokens = math.prod(leading)
            if rows in sizes and tokens in counts and not (rows == columns and rows in lengths):
                found = (tokens, rows, columns)
            elif tokens == 1:
                for count in counts:
                    if rows % count == 0 and rows // count in sizes and (rows // count, columns) != (count, count):
                        found = (count, rows // count, columns)
        if found is None and columns in products and before_last in counts:
            found = (before_last, *products[columns])
        if found is not None and math.prod(shape) not in weights:
            result[index] = found
    if any(rows == columns for _, rows, columns in result.values()):  # features as many as tokens
        scores = score_storages(context)
        result = {index: one for index, one in result.items() if one[1] != one[2] or index not in scores}
    return result
