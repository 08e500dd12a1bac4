"""The answer of `memprof recommend` for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.errors import printable
from memprof.ledger.bridge import NCCL_GROUP_BYTES
from memprof.report.documents import recommendation
from memprof.report.terminal.console import Aligned, ShellCommand, dim, heading, indented, section, show
from memprof.units import format_bytes, format_count, gib

_SHOWN = 10  # Rows of the table that are shown without --explain.

_ONE_PROCESS = "device-map"  # A plan without groups of processes (workload/plan.py).


def print_recommendation(answer: recommendation.Recommendation, *, explain: bool = False, quiet: bool = False) -> None:
    """Write the answer to stdout, in colour on a terminal; with `quiet`, only the recommended configuration."""
    if quiet:
        show((_largest if answer.largest else _configuration)(answer, explain=False)[0])
        return
    show(view(answer, explain=explain))
    # As they are, so that they can be copied.
    sys.stdout.write(printable(_scripts(answer)))


def _scripts(answer: recommendation.Recommendation) -> str:
    return "".join(
        f"{_TITLES[name]} (memprof recommend ... --snippet {name})\n"
        + (f"for: {answer.written_for[name]}\n" if name in answer.written_for else "")
        + (f"start with: {answer.launch[name]}\n" if name in answer.launch else "")
        + f"\n{script}\n"
        for name, script in answer.snippets.items()
    )


_TITLES = {
    "pytorch": "Plain PyTorch",
    "transformers": "Hugging Face Trainer",
    "fully-shard": "Plain PyTorch: train.py",
    "accelerate": "accelerate: train_accelerate.py",
    "accelerate-yaml": "accelerate: accelerate.yaml",
    "torchtitan": "torchtitan 0.2: train.toml",
    "device-map": "Layers over the GPUs: infer.py",
    "tensor-parallel": "Each matrix over the GPUs: infer_tp.py",
}


def view(answer: recommendation.Recommendation, *, explain: bool = False) -> RenderableType:
    """Return the answer without its scripts."""
    note = [dim(f"The GPU: {answer.gpu_note}.")] if answer.gpu_note else []
    parts: list[RenderableType] = [render_heading(answer), *note, Text("")]
    parts += (_largest if answer.largest else _configuration)(answer, explain=explain)
    if answer.lengths is not None:
        parts += _lengths(answer.lengths)
    if explain:
        notes = [*answer.assumptions, *(f"Not run: {name}: {why}" for name, why in answer.not_applied.items())]
        parts.append(section("What was assumed", *map(dim, notes), below=1))
    return Group(*parts)


def verdict_lines(answer: recommendation.Recommendation) -> list[str]:
    """Return the recommended configuration, or that nothing fits."""
    if answer.largest:
        fitting = [row for row in answer.largest if row.model is not None]
        models = [f"{row.task}: {row.model}, up to {row.context_length or 0:,} tokens" for row in fitting]
        return models or ["Nothing fits"]
    if answer.chosen is None:
        return ["Nothing fits", answer.reason]
    use = f"Use {answer.chosen.name}; {_batches(answer.chosen, answer)}"
    return [use, _need(answer, answer.chosen), *_limits(answer.chosen, answer)]


def render_heading(answer: recommendation.Recommendation) -> Text:
    """Return the question: model, goal, batch and GPUs."""
    device = answer.device
    gpu = f"{device.name} ({gib(device.total_bytes or 0)} GiB)"
    gpu = f"{answer.gpus} x {gpu}" if answer.gpus > 1 else gpu
    if answer.model is None:
        return heading(f"What fits {gpu}")
    goal = "inference" if answer.goal == "infer" else f"training ({answer.goal})"
    # What takes no tokens, such as images, has no length.
    many = ("sequence" if answer.context_length else "sample") + ("" if answer.effective_batch == 1 else "s")
    length = f", {answer.context_length:,} tokens" if answer.context_length else ""
    batch = f"{many} at a time" if answer.goal == "infer" else f"{many} a step"
    size = format_count(answer.num_parameters or 0)
    asked = f"{answer.model} ({size} parameters), {goal}{length}"
    return heading(f"{asked}, {answer.effective_batch} {batch}, on {gpu}")


# -- a configuration --------------------------------------------------------------------------------------------------


def _configuration(answer: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    chosen = answer.chosen
    if chosen is not None:
        said = (chosen.name, _batches(chosen, answer), _need(answer, chosen), *_limits(chosen, answer))
        parts += [
            section("Use", *map(Text, said), below=1),
            Text(f"Why: {answer.reason}."),
            Text("Check", style="bold"),
            indented(ShellCommand(chosen.command), below=1),
        ]
    else:
        parts.append(section(Text("Nothing fits", style="bold red"), Text(answer.reason), below=1))
    if answer.alternatives:
        lines = [
            Text(f"{one.what}: {one.name}; {gib(one.needed_bytes)} GiB{' (an estimate)' if one.estimate else ''}")
            for one in answer.alternatives
        ]
        parts.append(section("How few GPUs do" if chosen is not None else "What would do", *lines, below=1))
    parts += _choices(answer, explain=explain)
    return parts


def _batches(chosen: recommendation.Configuration, answer: recommendation.Recommendation) -> str:
    if answer.goal == "infer":
        return f"{chosen.micro_batch} at a time"
    if chosen.accumulation == 1:
        return f"micro-batch {chosen.micro_batch}{' of a rank' * (answer.gpus > 1)}: the whole step at once"
    return f"micro-batch {chosen.micro_batch}, gradients of {chosen.accumulation} accumulated"


def _need(answer: recommendation.Recommendation, chosen: recommendation.Configuration) -> str:
    need = f"needs {gib(chosen.needed_bytes)} GiB"
    left = f"{need} of the GPU: {gib(chosen.headroom_bytes)} GiB are left"
    only_just = (
        f"fits, with allocator retries: without releasing its cache it {need}, {gib(-chosen.headroom_bytes)} more than "
        "the GPU has; the allocator "
        "releases what it holds and does not use, which takes time"
    )
    said = left if chosen.headroom_bytes >= 0 else only_just
    if answer.gpus == 1 or chosen.parallel == _ONE_PROCESS:
        return said
    least, most = map(format_bytes, NCCL_GROUP_BYTES)
    beside = ", of which NCCL takes" if chosen.headroom_bytes >= NCCL_GROUP_BYTES[1] else "; beside it NCCL takes"
    return f"{said}{beside} {least} to {most} a group where others measured it"


def _limits(chosen: recommendation.Configuration, answer: recommendation.Recommendation) -> Iterator[str]:
    if chosen.host_bytes > 0.1 * chosen.needed_bytes:
        each = " of each process" if answer.gpus > 1 else ""
        yield f"{gib(chosen.host_bytes)} GiB in host memory at the most{each}"
    moved = (chosen.link_seconds, "between GPUs") if answer.gpus > 1 else (chosen.bus_seconds, "transfers")
    yield f"step at least {_seconds(chosen.step_seconds)}, {_seconds(moved[0])} of it {moved[1]}"
    if answer.batch:
        on = ", on gradients of others" if chosen.accumulation > 1 else ""
        yield f"the largest {_batch_word(answer)} that fits{on}: {_bound(answer.batch)}"
    if answer.context:
        yield f"the longest context that fits: {_context(answer.context, answer.max_positions)}"


def _batch_word(answer: recommendation.Recommendation) -> str:
    return "batch" if answer.goal == "infer" else "micro-batch"


def _bound(bound: recommendation.LargestFit) -> str:
    if bound.largest is None:
        return "none"
    if bound.first_too_large is None:
        return f"{bound.largest:,} or more"
    return f"{bound.largest:,} ({bound.first_too_large:,} does not)"


def _context(bound: recommendation.LargestFit, made_for: int | None) -> str:
    if made_for is None or bound.largest is None:
        return _bound(bound)
    if bound.largest > made_for:
        return f"{_bound(bound)}; the model was made for {made_for:,}"
    return f"{bound.largest:,}, all that the model allows" if bound.first_too_large is None else _bound(bound)


def _choices(answer: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    rows = list(answer.choices)
    if not explain:
        front = [row for row in rows if row.pareto or row is rows[0]]
        rows = front if len(front) > 2 else rows[:_SHOWN]
    cells: list[tuple[str, ...]] = [
        (
            ">" if row is answer.chosen else "", str(row.micro_batch), gib(row.needed_bytes), gib(row.headroom_bytes),
            _seconds(row.step_seconds), _seconds(row.link_seconds if answer.gpus > 1 else row.bus_seconds),
            _verdict(row), row.name,
        )
        for row in rows
    ]  # fmt: skip
    moved = "of it links" if answer.gpus > 1 else "of it bus"
    headers = ("", f">{_batch_word(answer)}", ">needs", ">margin", ">step", f">{moved}", ">verdict", "configuration")
    left_out = len(answer.choices) - len(rows)
    more = f" {left_out} that another beats in both are left out (--explain)." if left_out else ""
    what = "Memory against time" if not explain else "All that were run"
    host = format_bytes(answer.device.host_memory_bytes or 0)
    verdicts = {
        "retries": "Retries: it fits once the allocator has released its cache. ",
        "host": f"Host: more than the {host} of host memory (--host-memory). ",
    }
    said = "".join(text for verdict, text in verdicts.items() if verdict in map(_verdict, rows))
    made = "1 run was made." if answer.runs == 1 else f"{answer.runs} runs were made."
    legend = f"GiB; step: the least time at the GPU's published rates.{more} {said}{made}"
    failed = [] if explain else _not_run(answer)
    return [
        section(what, Aligned(headers, cells, drop=(moved, "margin", "step")), below=1),
        indented(dim(legend), *failed, below=1),
    ]


def _not_run(answer: recommendation.Recommendation) -> list[Text]:
    return [Text(f"Could not be run: {name}: {why}") for name, why in answer.not_applied.items()]


def _verdict(row: recommendation.Configuration) -> str:
    if row.fits:
        return "fits" if row.headroom_bytes >= 0 else "retries"
    return "host" if row.oom_stage == "host memory" else "OOM"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.2f} ms"


# -- a GPU alone -----------------------------------------------------------------------------------------------------


def _largest(answer: recommendation.Recommendation, *, explain: bool) -> list[RenderableType]:
    headers = ("use", "largest model", ">parameters", ">needs", ">context", ">next larger", ">needs")
    legend = (
        f"GiB at {answer.context_length:,} tokens, one sequence at a time. Context: the longest that fits with this "
        "model; all: that it allows. Next larger: needs too much (more: its weights alone do)."
    )
    commands = [ShellCommand(row.command) for row in answer.largest if row.model is not None]
    return [
        indented(
            Aligned(headers, [*map(_largest_cells, answer.largest)], drop=("needs", "next larger", "parameters")),
            below=1,
        ),
        indented(dim(legend), *([] if explain else _not_run(answer)), below=1),
        section("Each as a run of its own, at its longest context", *commands, below=1),
    ]


def _largest_cells(row: recommendation.Largest) -> tuple[str, ...]:
    after = row.next_model or "-", "more" if row.next_needed_bytes is None else gib(row.next_needed_bytes)
    if row.model is None:
        return row.task, "none", "-", "-", "-", *after
    context = f"{row.context_length or 0:,}" + ("" if row.first_too_long is not None else " (all)")
    return row.task, row.model, format_count(row.num_parameters), gib(row.needed_bytes), context, *after


# -- the lengths of a data set ----------------------------------------------------------------------------------------


def _lengths(lengths: recommendation.LengthRisk) -> list[RenderableType]:
    packed = f"{lengths.packed_rows:,} rows of {lengths.context_length:,}"
    lines = [
        Text(f"{lengths.file}: {lengths.count:,} sequences of {lengths.shortest:,} to {lengths.longest:,} tokens"),
        Text(f"median {lengths.median:,}, 99% are at most {lengths.p99:,}; packed: {packed}"),
    ]
    if lengths.truncated:
        lines.append(Text(f"{lengths.truncated:,} longer ones are cut to {lengths.context_length:,} tokens"))
    if lengths.empty or lengths.bad:
        named = f": {'; '.join(lengths.bad_examples)}" if lengths.bad_examples else ""
        lines.append(Text(f"left out: {lengths.empty:,} empty, {lengths.bad:,} no length{named}", style="yellow"))
    headers = (
        ">micro-batch", ">fits up to", ">too long", ">of a batch", ">of an epoch", ">random: 50%", ">90%",
        ">ascending", ">descending", ">packed",
    )  # fmt: skip
    cells = [_length_cells(row) for row in lengths.rows]
    legend = (
        "Fits up to: tokens of the longest sequence of a batch. Odds: that a batch, or an epoch in random order, has a "
        "sequence that is too long. Then the step at which it runs out of memory: by which the odds are 50% and 90% in "
        "random order, and with sequences sorted by length (descending: also group_by_length). Full batches alone."
    )
    return [
        section("The data set", *lines, below=1),
        indented(Aligned(headers, cells, drop=("of a batch", "ascending", "descending", "packed")), below=1),
        indented(dim(legend), below=1),
        *([] if lengths.stream is None else [_stream(lengths.stream)]),
    ]


def _stream(stream: recommendation.ChosenOverBatches) -> RenderableType:
    verdict = "fits all of them" if stream.fits else f"runs out of memory in {stream.oom_stage}"
    if stream.alloc_conf:
        verdict += f", with {stream.alloc_conf}"
    cells = [(row.how, gib(row.mean_bytes), gib(row.p99_bytes), gib(row.peak_bytes)) for row in stream.reserved]
    made = Aligned(("reserved in a step, GiB", ">mean", ">p99", ">peak"), cells)
    return section(f"Over {stream.batches:,} batches of these lengths, it {verdict}", made, below=1)


def _length_cells(row: recommendation.LengthRow) -> tuple[str, ...]:
    longest = "none" if row.longest_fitting is None else f"{row.longest_fitting:,}"
    odds = (_odds(row.batch_odds), _odds(row.epoch_odds))
    steps = (row.first_step_median, row.first_step_90, row.step_sorted_ascending, row.step_sorted_descending)
    reached = ("never" if step is None else f"step {step:,}" for step in steps)
    return str(row.micro_batch), longest, f"{row.too_long:,}", *odds, *reached, "fits" if row.packed_fits else "OOM"


def _odds(odds: float) -> str:
    if odds in (0.0, 1.0):
        return f"{odds:.0%}"
    return f"{odds:.2%}" if 0.0001 <= odds <= 0.9999 else "< 0.01%" if odds < 0.5 else "> 99.99%"
