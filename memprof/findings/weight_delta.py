"""Rule `weight-delta-per-token`: a tensor with a weight matrix for each token, as of einsum('bsr,dr,rf->bsdf')."""

from __future__ import annotations

import collections
import functools
import math

from memprof.findings import evidence
from memprof.findings.attention_scores import find_score_storages
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import strip_wrappers
from memprof.units import GIB, format_bytes

MIN_DIM = 256  # activations with smaller matrices per token, [tokens x 64 x 64], are normal: heads, ranks, states

MIN_TOKENS = 16  # fewer are sequences or experts, for which a matrix each is intended

MIN_BYTES = GIB
MIN_SHARE = 0.05  # of the peak; reported if the tensors take this share, or MIN_BYTES


@rule(90, guides_search=True)
def find(context: Context) -> list[Finding]:
    """Return one finding for all such tensors; `num_bytes` is the maximum of the bytes that are live at once."""
    matches = _find_matrices_per_token(context)
    if not matches:
        return []
    ledger, lifetimes = context.ledger, context.lifetimes
    most = lifetimes.find_max_live(matches)
    if most.num_bytes < MIN_BYTES and most.num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    trace = ledger.trace
    # The program must change the line of the first such tensor; the other tensors are computed from it.
    first_index = min(most.storages, key=lambda index: lifetimes.births[index])
    storage = trace.storages[first_index]
    tokens, rows, columns = matches[first_index]
    module = evidence.module_pattern(trace, storage)
    in_module = f" in {module}" if module else ""
    line, such = evidence.file_and_line(trace.source_line(storage)), evidence.plural(len(most.storages), "such tensor")
    share = evidence.percent(most.num_bytes, ledger.peak_bytes)
    title = (
        f"A {rows} x {columns} weight delta for each of {tokens} tokens: {format_bytes(storage.num_bytes)} at "
        f"{line}{in_module}, {such} with {format_bytes(most.num_bytes)} live at once ({share} of the peak)"
    )

    def label(index: int) -> str:
        tokens, rows, columns = matches[index]
        return f"{tokens} tokens x {evidence.format_shape((rows, columns))}"

    lines = evidence.tensors_evidence(context, matches, most.event, label)
    fixes = evidence.suggest_fixes(context, "weight-delta-per-token")
    return [Finding("weight-delta-per-token", Severity.WARNING, title, most.num_bytes, lines, fixes)]


def _find_matrices_per_token(context: Context) -> dict[int, tuple[int, int, int]]:
    """Return storage -> (tokens, rows, columns) for the storages that contain a matrix for each token.

    Rows and columns must be dimensions of parameters of the module that allocates the tensor. The layout is
    [..., rows, columns], [..., tokens * rows, columns] or, if a parameter has the shape [rows x columns],
    [tokens, rows * columns], as einsum and bmm return it. Excluded are token features, tensors with as many elements as
    a parameter (gradients of experts, casts of weights), logits, attention scores, and feature maps.
    """
    trace = context.ledger.trace
    named = [(strip_wrappers(name), trace.storages[i].shape) for i, name in evidence.param_names(trace).items()]
    parameter_sizes = {math.prod(shape) for _, shape in named}
    vocabulary_size = evidence.vocab_size_of(context)
    # An input with one number per sample is a label or a time, not a text.
    text_shapes = (shape for shape in evidence.find_input_shapes(context) if len(shape) > 1 and shape[-1] > 1)
    token_counts = {count for count in map(math.prod, text_shapes) if count >= MIN_TOKENS}
    feature_map_sizes = evidence.find_feature_map_sizes(trace)
    context_lengths = {context.context_length} if context.context_length else set()
    is_compute_phase = evidence.mask_compute_phases(trace)
    below: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)  # module's path -> parameters' shapes
    for name, shape in named:
        path_parts = name.split(".")
        for end in range(len(path_parts)):
            below[".".join(path_parts[:end])].append(shape)

    @functools.cache
    def get_module_sizes(module: str) -> tuple[set[int], dict[int, tuple[int, int]]]:
        """Return the dimension sizes of a module's parameters ("": of all), and num_elements -> (rows, columns)."""
        shapes = below.get(module, [])
        matrices = {shape[-2:] for shape in shapes if len(shape) >= 2 and min(shape[-2:]) >= MIN_DIM}
        matrices |= {(columns, rows) for rows, columns in matrices}
        sizes = {size for shape in shapes for size in shape if size >= MIN_DIM and size != vocabulary_size}
        return sizes, {rows * columns: (rows, columns) for rows, columns in matrices}

    result: dict[int, tuple[int, int, int]] = {}
    for i, storage in enumerate(trace.storages):
        shape = storage.shape
        if (
            len(shape) < 2
            or not is_compute_phase[storage.phase]
            or shape[-1] < MIN_DIM
            or storage.hidden
            or i in trace.owners
            or shape[-1] == vocabulary_size
            or shape[-2:] in feature_map_sizes
            or math.prod(shape) in parameter_sizes
        ):
            continue
        *leading, rows, columns = shape
        tokens, num_rows = math.prod(leading), math.prod(shape[:-1])
        candidates = [(tokens, rows)] if tokens in token_counts else []
        if tokens == 1:
            candidates += [(count, rows // count) for count in token_counts if rows % count == 0]
        if any(count % num_rows == 0 for count in token_counts):
            candidates = []
        if candidates or num_rows in token_counts:
            sizes, products = get_module_sizes(strip_wrappers(trace.module_path(storage) or ""))
            for tokens, rows in candidates:
                if {rows, columns} <= sizes and not (rows == columns and rows in {tokens, *context_lengths}):
                    result[i] = (tokens, rows, columns)
            if columns in products and num_rows in token_counts:
                result.setdefault(i, (num_rows, *products[columns]))
    if any(rows == columns for _, rows, columns in result.values()):  # features as many as tokens
        scores = find_score_storages(context)
        result = {i: match for i, match in result.items() if match[1] != match[2] or i not in scores}
    return result
