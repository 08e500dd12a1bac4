"""A whole weight matrix for every token, as of einsum('bsr,dr,rf->bsdf') (448 GiB at 4 x 512, 4096 x 14336)."""

from __future__ import annotations

import collections
import functools
import math

from memprof.findings import evidence
from memprof.findings.attention_scores import find_score_storages
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import strip_wrappers
from memprof.units import GIB, format_bytes

MIN_DIM = 256  # smaller matrices are heads, ranks and states: an activation that is [tokens x 64 x 64] is nothing odd

MIN_TOKENS = 16  # fewer are sequences or experts: a matrix for each is the fix, not the problem

MIN_BYTES = GIB
MIN_SHARE = 0.05  # it is found when it takes more than one of these two


@rule(90, guides_search=True)
def find(context: Context) -> list[Finding]:
    """Return one finding for all such tensors; `num_bytes` is their largest sum at one moment."""
    matches = _find_matrices_per_token(context)
    if not matches:
        return []
    ledger, lives = context.ledger, context.lives
    most = lives.find_max_live(matches)
    if most.num_bytes < MIN_BYTES and most.num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    trace = ledger.trace
    # The forward tensor that was made first is the line to change; the others follow from it.
    first = min(most.storages, key=lambda index: lives.births[index])
    storage = trace.storages[first]
    tokens, rows, columns = matches[first]
    module = evidence.module_pattern(trace, storage)
    inside = f" in {module}" if module else ""
    line, such = evidence.file_and_line(trace.source_line(storage)), evidence.plural(len(most.storages), "such tensor")
    share = evidence.percent(most.num_bytes, ledger.peak_bytes)
    title = (
        f"A {rows} x {columns} weight delta for each of {tokens} tokens: {format_bytes(storage.num_bytes)} at "
        f"{line}{inside}, {such} with {format_bytes(most.num_bytes)} live at once ({share} of the peak)"
    )

    def label(index: int) -> str:
        tokens, rows, columns = matches[index]
        return f"{tokens} tokens x {evidence.format_shape((rows, columns))}"

    lines = evidence.tensors_evidence(context, matches, most.event, label)
    fixes = evidence.suggest_fixes(context, "weight-delta-per-token")
    return [Finding("weight-delta-per-token", Severity.WARNING, title, most.num_bytes, lines, fixes)]


def _find_matrices_per_token(context: Context) -> dict[int, tuple[int, int, int]]:
    """Return tokens, rows and columns of the storages that hold a matrix for each token, by storage.

    Rows and columns must be dimensions of parameters of the module that makes the tensor; sizes of other modules'
    parameters may be equal by coincidence (as many patches as a time embedding has features). The layout is one of the
    results of einsum and bmm: [..., rows, columns], [..., tokens * rows, columns] or, if a parameter has the shape
    [rows x columns], [tokens, rows * columns]. Excluded are features of a batch's tokens or of a chunk of tokens,
    tensors as large as a parameter (gradients of experts, casts of weights), logits, S x S scores, and feature maps.
    """
    trace = context.ledger.trace
    named = [(strip_wrappers(name), trace.storages[index].shape) for index, name in evidence.get_parameter_names(trace).items()]
    weights = {math.prod(shape) for _, shape in named}
    words = evidence.find_vocabulary_size(context)
    # One number a sample is a label or a time: taken for text, the batch would be its tokens.
    texts = (shape for shape in evidence.find_input_shapes(context) if len(shape) > 1 and shape[-1] > 1)
    counts = {count for count in map(math.prod, texts) if count >= MIN_TOKENS}
    maps = evidence.find_feature_map_sizes(trace)
    lengths = {context.context_length} if context.context_length else set()
    computes = evidence.mask_compute_phases(trace)
    below: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)  # a module's path -> its parameters' shapes
    for name, shape in named:
        parts = name.split(".")
        for end in range(len(parts)):
            below[".".join(parts[:end])].append(shape)

    @functools.cache
    def sizes_in(module: str) -> tuple[set[int], dict[int, tuple[int, int]]]:
        """Return the dimensions of a module's parameters ("": of all), and their matrices by number of elements."""
        shapes = below.get(module, [])
        matrices = {shape[-2:] for shape in shapes if len(shape) >= 2 and min(shape[-2:]) >= MIN_DIM}
        matrices |= {(columns, rows) for rows, columns in matrices}
        sizes = {size for shape in shapes for size in shape if size >= MIN_DIM and size != words}
        return sizes, {rows * columns: (rows, columns) for rows, columns in matrices}

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
            or math.prod(shape) in weights
        ):
            continue
        *leading, rows, columns = shape
        tokens, before_last = math.prod(leading), math.prod(shape[:-1])
        possible = [(tokens, rows)] if tokens in counts else []
        if tokens == 1:
            possible += [(count, rows // count) for count in counts if rows % count == 0]
        if any(count % before_last == 0 for count in counts):
            possible = []
        if possible or before_last in counts:
            sizes, products = sizes_in(strip_wrappers(trace.module_path(storage) or ""))
            for tokens, rows in possible:
                if {rows, columns} <= sizes and not (rows == columns and rows in {tokens, *lengths}):
                    result[index] = (tokens, rows, columns)
            if columns in products and before_last in counts:
                result.setdefault(index, (before_last, *products[columns]))
    if any(rows == columns for _, rows, columns in result.values()):  # features as many as tokens
        scores = find_score_storages(context)
        result = {index: one for index, one in result.items() if one[1] != one[2] or index not in scores}
    return result
