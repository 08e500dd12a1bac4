"""The result of `memprof recommend` as text for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.errors import printable
from memprof.ledger.bridge import NCCL_GROUP_BYTES
from memprof.report.documents import recommendation
from memprof.report.documents.limit import PAGING
from memprof.report.terminal.cells import format_seconds
from memprof.report.terminal.console import (
    AlignedLines,
    ShellCommand,
    dim,
    indent,
    make_heading,
    make_section,
    print_view,
)
from memprof.units import format_bytes, format_count, gib

_MAX_RUN_MICRO_BATCHES = 2  # Of a step, in the command that checks a configuration.
_MAX_ROWS = 10  # Rows of the table that are shown without --explain.

_SINGLE_PROCESS_PLAN = "device-map"  # A plan without groups of processes (workload/plan.py).


def print_recommendation(
    result: recommendation.Recommendation, *, explain: bool = False, full: bool = False, quiet: bool = False
) -> None:
    """Print a recommendation to stdout, in colour on a terminal; `full` adds the code to paste, `quiet` leaves only the
    recommended configuration."""
    if quiet:
        print_view(Group(*(_render_largest(result, explain=False)[:1] if result.largest else _render_answer(result))))
        return
    print_view(render(result, explain=explain))
    if full:  # not wrapped, so that they can be copied
        sys.stdout.write(printable(_format_snippets(result)))
    elif result.snippets:
        print_view(dim(f"More: --full (the code to paste; or --snippet {' or '.join(result.snippets)}), --explain"))


def _format_snippets(result: recommendation.Recommendation) -> str:
    return "".join(
        f"{_SNIPPET_TITLES[name]} (memprof recommend ... --snippet {name})\n"
        + (f"for: {result.written_for[name]}\n" if name in result.written_for else "")
        + (f"start with: {result.launch[name]}\n" if name in result.launch else "")
        + f"\n{script}\n"
        for name, script in result.snippets.items()
    )


_SNIPPET_TITLES = {
    "pytorch": "Plain PyTorch",
    "transformers": "Hugging Face Trainer",
    "fully-shard": "Plain PyTorch: train.py",
    "accelerate": "accelerate: train_accelerate.py",
    "accelerate-yaml": "accelerate: accelerate.yaml",
    "torchtitan": "torchtitan 0.2: train.toml",
    "device-map": "Layers over the GPUs: infer.py",
    "tensor-parallel": "Each matrix over the GPUs: infer_tp.py",
}


def render(result: recommendation.Recommendation, *, explain: bool = False) -> RenderableType:
    """Return a recommendation without its snippets, for a terminal; `explain` adds assumptions and all runs."""
    note = [dim(f"The GPU: {result.gpu_note}.")] if result.gpu_note else []
    heading: list[RenderableType] = [render_heading(result), *note, Text("")]
    if result.largest:
        parts = [*heading, *_render_largest(result, explain=explain)]
    else:
        parts = [*_render_answer(result), *heading, *_render_configuration(result, explain=explain)]
    if result.lengths is not None:
        parts += _render_lengths(result.lengths)
    if explain:
        notes = [*result.assumptions, *(f"Not run: {name}: {why}" for name, why in result.not_applied.items())]
        parts.append(make_section("What was assumed", *map(dim, notes), below=1))
    return Group(*parts)


def format_verdict_lines(result: recommendation.Recommendation) -> list[str]:
    """Return the recommended configuration or the fitting models, one line each; `Nothing fits` if there are none."""
    if result.largest:
        fitting = [row for row in result.largest if row.model is not None]
        models = [f"{row.task}: {row.model}, up to {row.context_length or 0:,} tokens" for row in fitting]
        return models or ["Nothing fits"]
    if result.chosen is None:
        return ["Nothing fits", result.reason]
    first_line = f"Use {result.chosen.name}; {_format_batches(result.chosen, result)}"
    return [first_line, _format_need(result, result.chosen), *_format_limits(result.chosen, result)]


def render_heading(result: recommendation.Recommendation) -> Text:
    """Return the heading of a recommendation: model, goal, batch and GPUs."""
    device = result.device
    size = f"{gib(device.total_bytes or 0)} GiB"
    is_custom = size in device.name  # "custom GPU with 8.00 GiB"
    gpu = device.name if is_custom else f"{device.name} ({size})"
    gpu = f"{result.gpus} x {gpu}" if result.gpus > 1 else f"{'a ' * is_custom}{gpu}"
    if result.model is None:
        return make_heading(f"What fits {gpu}")
    goal = "inference" if result.goal == "infer" else f"training ({result.goal})"
    # What takes no tokens, such as images, has no length.
    unit = ("sequence" if result.context_length else "sample") + ("" if result.effective_batch == 1 else "s")
    length = f", {result.context_length:,} tokens" if result.context_length else ""
    batch = f"{unit} at a time" if result.goal == "infer" else f"{unit} a step"
    size = format_count(result.num_parameters or 0)
    description = f"{result.model} ({size} parameters), {goal}{length}"
    return make_heading(f"{description}, {result.effective_batch} {batch}, on {gpu}")


def _render_answer(result: recommendation.Recommendation) -> list[RenderableType]:
    """Return the configuration to use, what it needs and its limits; or that nothing fits, and why."""
    first, *others = format_verdict_lines(result)
    return [Text(first, style="bold" if result.chosen is not None else "bold red"), indent(*map(Text, others))]


def _render_configuration(result: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    chosen = result.chosen
    if chosen is not None:
        parts += [
            Text(f"Why: {result.reason}."),
            Text("Check", style="bold").append(_describe_shorter_run(chosen), style="not bold"),
            indent(ShellCommand(chosen.command), below=1),
        ]
    if result.alternatives:
        alternatives = [
            Text(f"{row.what}: {row.name}; {gib(row.needed_bytes)} GiB{' (an estimate)' if row.estimate else ''}")
            for row in result.alternatives
        ]
        parts.append(make_section("How few GPUs do" if chosen is not None else "What would do", *alternatives, below=1))
    parts += _render_choices(result, explain=explain)
    return parts


def _describe_shorter_run(chosen: recommendation.Configuration) -> str:
    """Return a note where the command of `chosen` accumulates the gradients of fewer micro-batches."""
    if chosen.accumulation <= _MAX_RUN_MICRO_BATCHES:
        return ""
    return f" (of the {chosen.accumulation} micro-batches {_MAX_RUN_MICRO_BATCHES} are run: the others need no more)"


def _format_batches(chosen: recommendation.Configuration, result: recommendation.Recommendation) -> str:
    if result.goal == "infer":
        return f"{chosen.micro_batch} at a time"
    if chosen.accumulation == 1:
        return f"micro-batch {chosen.micro_batch}{' of a rank' * (result.gpus > 1)}: the whole step at once"
    return f"micro-batch {chosen.micro_batch}, gradients of {chosen.accumulation} accumulated"


def _format_need(result: recommendation.Recommendation, chosen: recommendation.Configuration) -> str:
    need = f"needs {gib(chosen.needed_bytes)} GiB"
    headroom_text = f"{need} of the GPU: {gib(chosen.headroom_bytes)} GiB are left"
    retries_text = (
        f"fits, with allocator retries: without releasing its cache it {need}, {gib(-chosen.headroom_bytes)} more than "
        "the GPU has; the allocator "
        "releases what it holds and does not use, which takes time"
    )
    text = headroom_text if chosen.headroom_bytes >= 0 else retries_text
    if result.gpus == 1 or chosen.parallel == _SINGLE_PROCESS_PLAN:
        return text
    min_nccl, max_nccl = map(format_bytes, NCCL_GROUP_BYTES)
    nccl_text = ", of which NCCL takes" if chosen.headroom_bytes >= NCCL_GROUP_BYTES[1] else "; beside it NCCL takes"
    return f"{text}{nccl_text} {min_nccl} to {max_nccl} a group where others measured it"


def _format_limits(chosen: recommendation.Configuration, result: recommendation.Recommendation) -> Iterator[str]:
    if chosen.host_bytes > 0.1 * chosen.needed_bytes:
        suffix = " of each process" if result.gpus > 1 else ""
        yield f"{gib(chosen.host_bytes)} GiB in host memory at the most{suffix}"
    transfers = (chosen.link_seconds, "between GPUs") if result.gpus > 1 else (chosen.bus_seconds, "transfers")
    yield f"step at least {_format_seconds(chosen.step_seconds)}, {_format_seconds(transfers[0])} of it {transfers[1]}"
    if result.batch:
        note = " beside accumulated gradients" if chosen.accumulation > 1 else ""
        yield f"the largest {_name_batch(result)} that fits{note}: {_format_bound(result.batch)}"
    if result.context:
        yield f"the longest context that fits: {_format_context(result.context, result.max_positions)}"


def _name_batch(result: recommendation.Recommendation) -> str:
    return "batch" if result.goal == "infer" else "micro-batch"


def _format_bound(fit: recommendation.LargestFit) -> str:
    if fit.largest is None:
        return "none"
    if fit.first_too_large is None:
        return f"{fit.largest:,} or more"
    return f"{fit.largest:,} ({fit.first_too_large:,} does not)"


def _format_context(fit: recommendation.LargestFit, max_positions: int | None) -> str:
    if max_positions is None or fit.largest is None:
        return _format_bound(fit)
    if fit.largest > max_positions:
        return f"{_format_bound(fit)}; the model was made for {max_positions:,}"
    return f"{fit.largest:,}, all that the model allows" if fit.first_too_large is None else _format_bound(fit)


def _render_choices(result: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    rows = list(result.choices)
    if not explain:
        pareto_rows = [row for row in rows if row.pareto or row is rows[0]]
        rows = pareto_rows if len(pareto_rows) > 2 else rows[:_MAX_ROWS]
    numbers = {id(row): number for number, row in enumerate(result.choices, 1)}
    moves = [row.link_seconds if result.gpus > 1 else row.bus_seconds for row in rows]
    cells: list[tuple[str, ...]] = [
        (
            f"{'>' if row is result.chosen else ''}{numbers[id(row)]}", str(row.micro_batch), gib(row.needed_bytes),
            gib(row.headroom_bytes), _format_seconds(row.step_seconds), _format_seconds(moved_seconds),
            _format_verdict(row), row.name,
        )
        for row, moved_seconds in zip(rows, moves, strict=True)
    ]  # fmt: skip
    moved = "in links" if result.gpus > 1 else "in transfers"
    headers = (
        ">row",
        f">{_name_batch(result)}",
        ">needs",
        ">margin",
        ">step",
        f">{moved}",
        ">verdict",
        "configuration",
    )
    num_left_out = len(result.choices) - len(rows)
    left_out_note = f" {num_left_out} that another beats in both are left out (--explain)." if num_left_out else ""
    title = "Memory against time" if not explain else "All that were run"
    host = format_bytes(result.device.host_memory_bytes or 0)
    verdicts = {
        "retries": "Retries: it fits once the allocator has released its cache. ",
        "host": f"Host: more than the {host} of host memory (--host-memory). ",
        "pages": "Pages: the system compresses some of the memory or moves it to disk. ",
    }
    verdict_note = "".join(text for verdict, text in verdicts.items() if verdict in map(_format_verdict, rows))
    runs_note = "1 run was made." if result.runs == 1 else f"{result.runs} runs were made."
    runs_note += " --row NUMBER runs a row."
    legend = f"GiB; step: the least time at the GPU's published rates.{left_out_note} {verdict_note}{runs_note}"
    failed_runs = [] if explain else _render_failed_runs(result)
    return [
        make_section(title, AlignedLines(headers, cells, optional=(moved, "margin", "step")), below=1),
        indent(dim(legend), *failed_runs, below=1),
    ]


def _render_failed_runs(result: recommendation.Recommendation) -> list[Text]:
    return [Text(f"Could not be run: {name}: {why}") for name, why in result.not_applied.items()]


def _format_verdict(row: recommendation.Configuration) -> str:
    if row.fits:
        return "fits" if row.headroom_bytes >= 0 else "retries"
    return {"host memory": "host", PAGING: "pages"}.get(row.oom_stage, "OOM")


def _format_seconds(seconds: float | None) -> str:
    return "?" if seconds is None else format_seconds(seconds, 0 if seconds >= 100 else 2)


def _render_largest(result: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    headers = (">row", "use", "largest model", ">parameters", ">needs", ">context", ">next larger", ">needs")
    legend = (
        f"GiB at {result.context_length:,} tokens, one sequence at a time. Context: the longest that fits with this "
        "model; all: the model allows no more. Next larger: does not fit (more: nor do its weights). --row N runs it."
    )
    return [
        indent(
            AlignedLines(
                headers,
                [(str(number), *_format_largest(row)) for number, row in enumerate(result.largest, 1)],
                optional=("parameters", "needs", "next larger", "context"),
            ),
            below=1,
        ),
        indent(dim(legend), *([] if explain else _render_failed_runs(result)), below=1),
    ]


def _format_largest(row: recommendation.LargestModel) -> tuple[str, ...]:
    next_larger = row.next_model or "-", "more" if row.next_needed_bytes is None else gib(row.next_needed_bytes)
    if row.model is None:
        return row.task, "none", "-", "-", "-", *next_larger
    context = f"{row.context_length or 0:,}" + ("" if row.first_too_long is not None else " (all)")
    return row.task, row.model, format_count(row.num_parameters), gib(row.needed_bytes), context, *next_larger


def _render_lengths(lengths: recommendation.LengthRisk) -> list[RenderableType]:
    packed = f"{lengths.packed_rows:,} rows of {lengths.context_length:,}"
    lines = [
        Text(f"{lengths.file}: {lengths.count:,} sequences of {lengths.shortest:,} to {lengths.longest:,} tokens"),
        Text(f"median {lengths.median:,}, 99% are at most {lengths.p99:,}; packed: {packed}"),
    ]
    if lengths.truncated:
        lines.append(Text(f"{lengths.truncated:,} longer ones are cut to {lengths.context_length:,} tokens"))
    if lengths.empty or lengths.bad:
        examples = f": {'; '.join(lengths.bad_examples)}" if lengths.bad_examples else ""
        lines.append(Text(f"left out: {lengths.empty:,} empty, {lengths.bad:,} no length{examples}", style="yellow"))
    headers = (
        ">micro-batch", ">fits up to", ">too long", ">of a batch", ">of an epoch", ">random: 50%", ">90%",
        ">ascending", ">descending", ">packed",
    )  # fmt: skip
    cells = [_format_length_row(row) for row in lengths.rows]
    legend = (
        "Fits up to: tokens of the longest sequence of a batch. Odds: that a batch, or an epoch in random order, has a "
        "sequence that is too long. Then the step at which it runs out of memory: by which the odds are 50% and 90% in "
        "random order, and with sequences sorted by length (descending: also group_by_length). Full batches alone."
    )
    return [
        make_section("The data set", *lines, below=1),
        indent(AlignedLines(headers, cells, optional=("of a batch", "ascending", "descending", "packed")), below=1),
        indent(dim(legend), below=1),
        *([] if lengths.stream is None else [_render_stream(lengths.stream)]),
    ]


def _render_stream(stream: recommendation.DataLoaderRun) -> RenderableType:
    verdict = "fits all of them" if stream.fits else f"runs out of memory in {stream.oom_stage}"
    if stream.alloc_conf:
        verdict += f", with {stream.alloc_conf}"
    cells = [(row.how, gib(row.mean_bytes), gib(row.p99_bytes), gib(row.peak_bytes)) for row in stream.reserved]
    table = AlignedLines(("reserved in a step, GiB", ">mean", ">p99", ">peak"), cells)
    return make_section(f"Over {stream.batches:,} batches of these lengths, it {verdict}", table, below=1)


def _format_length_row(row: recommendation.LengthRow) -> tuple[str, ...]:
    longest = "none" if row.longest_fitting is None else f"{row.longest_fitting:,}"
    odds = (_format_probability(row.batch_odds), _format_probability(row.epoch_odds))
    steps = (row.first_step_median, row.first_step_90, row.step_sorted_ascending, row.step_sorted_descending)
    step_texts = ("never" if step is None else f"step {step:,}" for step in steps)
    return str(row.micro_batch), longest, f"{row.too_long:,}", *odds, *step_texts, "fits" if row.packed_fits else "OOM"


def _format_probability(odds: float) -> str:
    if odds in (0.0, 1.0):
        return f"{odds:.0%}"
    return f"{odds:.2%}" if 0.0001 <= odds <= 0.9999 else "< 0.01%" if odds < 0.5 else "> 99.99%"
