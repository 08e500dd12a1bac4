"""The budget of an inference engine as plain text, without rich, whose import takes longer than the closed form."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.report.terminal.layout import align_columns, output_width, wrap_line
from memprof.serving.budget import LOG, RUN, EngineBudget
from memprof.units import GIB, KIB

_WIDTH = 100
_UTILIZATION_FLAGS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
_SOURCES = {RUN: "the engine's own code", LOG: "the engine's log"}


def render_engine_budget(budget: EngineBudget, *, explain: bool = False, quiet: bool = False) -> str:
    """Return a budget as text: the answer, the table, what to change and the command; `quiet` leaves the answer."""
    sections = [_wrap(_format_answer(budget))]
    if not quiet:
        sections += [[*_format_table(budget)], [*_format_limits(budget)], [*_format_changes(budget)]]
        sections.append([*_format_command(budget)])
        if explain:
            sections.append(["Assumptions:", *(line for text in budget.assumptions for line in _wrap(f"- {text}"))])
        elif budget.assumptions and budget.source != RUN:
            sections.append(["Assumptions: --explain"])
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def render_budget_table(budget: EngineBudget) -> str:
    """Return the table of a budget and its limits alone, as text below a diagnosis."""
    return "\n".join([*_format_table(budget), *_format_limits(budget)]) + "\n"


def _wrap(line: str) -> list[str]:
    return wrap_line(line, min(_WIDTH, output_width()), hanging_indent="")


def _format_answer(budget: EngineBudget) -> str:
    engine = f"{budget.engine} {budget.release}" if budget.release else budget.engine
    model = f" {budget.model}" if budget.model else ""
    count = f"{budget.tensor_parallel} x " if budget.tensor_parallel > 1 else ""
    gpu = f" on {count}{budget.gpu}" if budget.gpu else ""
    if not budget.starts:
        return f"{engine} does not start{model}{gpu}: {budget.refusal}"
    verb = "started" if budget.source == LOG else "starts"
    tokens = "" if budget.num_tokens is None else f": {budget.num_tokens:,} tokens of KV cache"
    requests = ""
    if budget.concurrency is not None and budget.context_length is not None:
        requests = f", {budget.concurrency:,.2f} requests of {budget.context_length:,} tokens at once"
        if budget.requested_concurrency is not None and budget.concurrency < budget.requested_concurrency:
            requests += f", of {budget.requested_concurrency:,} requested"
    return f"{engine} {verb}{model}{gpu}{tokens}{requests}."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"


def _format_table(budget: EngineBudget) -> Iterator[str]:
    """Yield the rows from the GPU's memory to the KV cache, without those that are not known."""
    names = [name for name in (budget.quantization, budget.dtype) if name]
    flag = _UTILIZATION_FLAGS.get(budget.engine, "")
    share = "" if budget.utilization is None else f"x {budget.utilization:g}, {flag}" if flag else ""
    graphs = ""
    if budget.graph_bytes is not None and budget.graph_taken_bytes is not None:
        graphs = f"as estimated by the engine; {_gib(budget.graph_taken_bytes)} taken"
    graph_bytes = budget.graph_taken_bytes if budget.graph_bytes is None else budget.graph_bytes
    graph_label = "CUDA graphs" if budget.graph_bytes is None else "- CUDA graphs"
    is_llama_cpp = budget.engine == "llama.cpp"
    rows = (
        ("GPU memory", budget.total_bytes, "as CUDA reports it"),
        ("may be used", None if is_llama_cpp else budget.budget_bytes, share),
        ("- weights", budget.weights_bytes, ", ".join(names)),
        ("- outside torch", budget.outside_torch_bytes, "CUDA context, libraries, NCCL"),
        ("- buffers", budget.buffers_bytes, "the engine's own, which stay allocated"),
        (
            "- compute buffer" if is_llama_cpp else "- profile run",
            budget.profile_peak_bytes,
            f"mostly {budget.profile_peak_reason}" if budget.profile_peak_reason else "",
        ),
        (graph_label, graph_bytes, graphs),
        ("= KV cache", budget.kv_cache_bytes, _format_cache(budget)),
    )
    cells = [(name, _gib(num_bytes), note) for name, num_bytes, note in rows if num_bytes is not None]
    if cells:
        per_gpu = "one of the GPUs" if budget.tensor_parallel > 1 else "one GPU"
        source = _SOURCES.get(budget.source, "closed form")
        lines, _ = align_columns((f"{per_gpu}, by {source}", ">GiB", ""), cells, min(_WIDTH, output_width()))
        yield from (piece for line in lines for piece in line.split("\n"))


def _format_cache(budget: EngineBudget) -> str:
    parts = []
    if budget.bytes_per_token is not None:
        parts.append(f"{budget.bytes_per_token / KIB:,.1f} KiB a token")
    if budget.kv_cache_dtype and budget.kv_cache_dtype != "auto":
        parts.append(budget.kv_cache_dtype)
    if budget.num_blocks == 0:
        return ", ".join(parts)
    if budget.num_blocks is not None and budget.block_size is not None:
        parts.append(f"{budget.num_blocks:,} blocks of {budget.block_size:,}")
    elif budget.num_blocks is not None:
        parts.append(f"{budget.num_blocks:,} blocks")
    return ", ".join(parts)


def _format_limits(budget: EngineBudget) -> Iterator[str]:
    has_band = budget.num_tokens_low is not None and budget.num_tokens_high is not None
    if budget.num_tokens and has_band and budget.starts:
        band = f"{budget.num_tokens_low:,} to {budget.num_tokens_high:,}"
        yield from _wrap(f"{budget.num_tokens:,} tokens, band {band} (against published logs: memprof help serving).")
    if budget.longest_context:
        yield f"Longest context that starts: {budget.longest_context:,} tokens."
    if budget.least_gpus is not None:
        plural = "s" if budget.least_gpus > 1 else ""
        yield f"Least number of these GPUs for this request: {budget.least_gpus} GPU{plural}."
    options = (("max_num_seqs", budget.max_num_seqs), ("max_num_batched_tokens", budget.max_num_batched_tokens))
    texts = [f"{name} {value:,}" for name, value in options if value is not None]
    if texts:
        yield f"In a step: {', '.join(texts)}."


def _format_changes(budget: EngineBudget) -> Iterator[str]:
    """Yield a table of changed options, with tokens and the difference to the budget."""
    if not budget.changes:
        return
    rows = []
    for change in budget.changes:
        has_tokens = change.num_tokens > 0 or change.kv_cache_bytes <= 0
        tokens = "not known" if not has_tokens else f"{change.num_tokens:,}" if change.num_tokens else "does not start"
        difference = change.num_tokens - (budget.num_tokens or 0)
        cost = change.cost if change.source != RUN else f"{change.cost} (by a run)".strip()
        rows.append((change.flag, _gib(change.kv_cache_bytes), tokens, f"{difference:+,}" if has_tokens else "", cost))
    headers = ("What to change", ">KV GiB", ">tokens", ">difference", "")
    lines, _ = align_columns(headers, rows, min(_WIDTH, output_width()))
    yield from (piece for line in lines for piece in line.split("\n"))


def _format_command(budget: EngineBudget) -> Iterator[str]:
    if budget.command:
        asked = budget.requested_concurrency
        is_enough = budget.starts and (asked is None or (budget.concurrency or 0) >= asked)
        yield "Start it with:" if is_enough else "What starts as requested:"
        yield f"  {budget.command}"
