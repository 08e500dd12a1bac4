"""The report as text for a terminal: stages, verdict, categories at the peak, largest tensors, findings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.findings import Evidence, Finding, Severity
from memprof.findings.exhaustion import Growth
from memprof.fixes.catalog import FIXES
from memprof.ledger.caught_errors import CaughtError
from memprof.ledger.stages import at_stage
from memprof.report.documents.report import Report, Verdict
from memprof.report.terminal.bridge import render_bridge, render_streams
from memprof.report.terminal.cells import Unit, choose_unit, format_shape
from memprof.report.terminal.console import dim, draw_bar, indent, make_heading, make_section, make_table
from memprof.report.terminal.device_readings import describe_gpu_differences, find_gpu_columns
from memprof.report.terminal.folding import choose_full_step, find_peak_row, fold_stages
from memprof.report.terminal.ladder import render_ladder
from memprof.report.terminal.limit import format_limit, render_limit
from memprof.report.terminal.next_step import choose_next_step, render_next_step
from memprof.report.terminal.ranks import render_gpus, render_ranks
from memprof.report.terminal.steps import render_batches, render_steps
from memprof.report.terminal.tensors import merge_equal_tensors, render_origin
from memprof.report.terminal.timeline import CategoryTimeline
from memprof.spec import Mode
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.trace.events import NOT_SIMULATED, FailureKind, short_source
from memprof.trace.facts import ProgramFacts, Target
from memprof.units import MIB, format_bytes, format_count, format_ranges, gib

MAX_TENSORS = 10
MAX_EVIDENCE = 6
MIN_HOST_BYTES = 64 * MIB  # Host memory below this has no column.
_BAR_WIDTH = 28
_REFUSED_WORKSPACES = (
    "Convolutions without room for cuDNN's workspace: {}. torch then takes another algorithm, here without workspace."
)
_MIN_UNCERTAIN_SHARE = 0.01  # Of the peak: below this share, the effect of unknown workspaces is not shown.
# Columns of the stage table in the order in which a narrow terminal drops them.
_OPTIONAL_COLUMNS = (
    "host peak",
    "seconds",
    "delta",
    "torch.cuda\nreserved",
    "NVML\nused",
    "reserved",
    "torch.cuda\npeak",
)
_SEVERITY_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def render(document: Report, *, explain: bool = False, quiet: bool = False) -> RenderableType:
    """Return the view of a report; `explain` adds the assumptions, `quiet` leaves only the verdict."""
    if quiet:
        return _render_verdict(document) if document.limit is None else Text(format_limit(document.limit))
    parts = [render_heading(document), _render_stages(document), _render_verdict(document)]
    parts += _render_certain_errors(document)
    parts += [Text(f"Note: {one}") for one in document.assumptions if one.endswith(NO_STUBS_HINT) and not explain]
    unit = _choose_unit(document)
    parts += [render_ranks(document.ranks, unit, on_cpu=document.on_cpu)] if document.ranks else []
    parts += [render_gpus(document.gpus, unit)] if document.gpus else []
    parts += [] if document.batches is None else [render_batches(document.batches, unit)]
    parts += [render_steps(document.steps, unit)] if document.steps else []
    parts += [] if document.limit is None else [render_limit(document.limit, document.device.total_bytes or 0)]
    parts.append(_render_categories(document))
    if document.over_time is not None:
        parts.append(CategoryTimeline(document.over_time, unit, at_stage(document.peak.stage, document.peak.step)))
    parts += [] if document.bridge is None else [render_bridge(document.bridge, unit)]
    parts += [] if document.streams is None else [render_streams(document.streams, unit)]
    parts += [_render_tensors(document), _render_findings(document)]
    parts += [render_ladder(document)] if document.ladder else []
    if explain:
        parts += [make_heading("What this rests on"), *(Text(f"  - {sentence}") for sentence in document.assumptions)]
    else:
        parts.append(dim(f"{len(document.assumptions)} assumptions: --explain lists them."))
    return Group(*parts, *render_next_step(choose_next_step(document)))


def _choose_unit(document: Report) -> Unit:
    return choose_unit(document.peak.allocated_bytes)


def render_heading(document: Report) -> RenderableType:
    """Return the heading of a report: command, GPU, and a description of the run."""
    device, target = document.device, document.target
    kind = "simulated on a virtual" if document.source == "simulated" else "measured on"
    size = "" if device.total_bytes is None else f" ({gib(device.total_bytes)} GiB)"
    lines = [make_heading("memprof", f" {document.command}: {kind} {device.name}{size}")]
    if document.rank is not None:
        rank, world = document.rank.rank, document.rank.world_size
        ran = format_ranges(row.rank for row in document.ranks)
        together = f"ranks {ran} of {world}, together; in full, rank {rank}:"
        if document.rank.alike:
            together = f"{world} ranks, one of each kind run alone; in full, rank {rank}:"
        lines.append(Text(together if ran else f"rank {rank} of {world}, alone: the others are taken to be like it"))
    if document.gpus:
        lines.append(Text(f"{len(document.gpus)} such GPUs in one process; in full, {document.gpu}:"))
    if target:
        lines.append(Text(_describe_target(target)))
    if document.program is not None:
        lines.append(Text(_describe_program(document.program)))
    return Group(*lines)


_TEXT_BY_ENDING = {
    "steps": "stopped after {steps}{unseen} (--steps and --until-exit go on)",
    "exit": "ran to its end, {steps}",
    "timeout": "stopped by --timeout {begun}",
    "error": "failed by itself {begun}",
    "not simulated": "stopped where it cannot be simulated, {begun}",
    "refused": "ended where the GPU was full, {begun}",
    "another rank": "stopped with the other ranks, {begun}",
    "interrupted": "interrupted {begun}",
}


def _describe_program(program: ProgramFacts) -> str:
    number = program.steps
    steps = "1 training step" if number == 1 else f"{number or 'no'} training steps"
    fixes = f", with {', '.join(program.fixes)}" if program.fixes else ""
    own_code = f"ended by itself with exit code {program.exit_code}, {{steps}}"
    how = own_code if _has_own_exit_code(program) else _TEXT_BY_ENDING[program.ended]
    begun = f"after {steps} had begun" if number else "before any training step"
    unseen = "" if program.evaluated else ", before any evaluation"
    return f"{shlex.join(program.command)}{fixes}: {how.format(steps=steps, begun=begun, unseen=unseen)}"


def _has_own_exit_code(program: ProgramFacts) -> bool:
    """Return whether the script itself set its exit code: memprof returns that code, though the verdict may differ."""
    return program.ended == "exit" and bool(program.exit_code)


def _describe_target(target: Target) -> str:
    asked, parts = target.asked, [target.model]
    if target.num_parameters:  # a run that failed early lacks the number
        parts[0] += f", {format_count(target.num_parameters)} parameters ({target.num_parameters:,})"
    if target.task == "image-classification":
        parts.append(f"batch {asked.batch_size} image{'s' if asked.batch_size > 1 else ''}")
    elif target.context_length is not None:
        up_to = "up to " if target.sequence_lengths else ""
        parts.append(f"batch {asked.batch_size} x {up_to}{target.context_length:,} tokens")
    elif target.num_parameters:
        parts.append(f"batch {asked.batch_size}")
    amp = f" with {asked.amp} autocast" if asked.amp else ""
    if target.dtype is not None:
        parts.append(f"{target.dtype}{amp}")
    parts.append(_describe_trained_part(target))
    if asked.mode is Mode.TRAIN:
        impl = f" ({asked.optimizer_impl})" if asked.optimizer_impl else ""
        parts += [
            "no optimizer" if asked.optimizer == "none" else f"{asked.optimizer}{impl}",
            "activation checkpointing" * asked.activation_checkpointing,
            f"{asked.gradient_accumulation} micro-batches" * (asked.gradient_accumulation > 1),
            "gradients zeroed, not freed" * (asked.zero_grad == "zero"),
            "evaluation after each step" * asked.evaluate,
        ]
    else:
        parts.append(f"inference, {asked.new_tokens:,} new tokens" if asked.new_tokens else "inference")
    parts += [f"{asked.attention} attention" if asked.attention else "", "compiled" * asked.compile, *asked.fixes]
    parts.append(f"allocator {target.alloc_conf}" if target.alloc_conf else "")
    return ", ".join(part for part in parts if part)


def _describe_trained_part(target: Target) -> str:
    """Return the adapter, the NPT components or the number of trained parameters; "" if all parameters train."""
    asked, trainable = target.asked, target.num_trainable_parameters
    if asked.adapter:
        name = f"{asked.adapter.upper().replace('LORA', 'LoRA')} of rank {asked.lora_rank}"
    elif asked.npt:
        sums = f"{asked.npt_num_ranks} rank-1 updates, " if asked.npt_num_ranks else ""
        name = f"NPT {asked.npt}, {sums}rank {asked.npt_rank}"
    else:
        is_part = trainable is not None and trainable < (target.num_parameters or 0)
        return f"{trainable:,} trained" if asked.mode is Mode.TRAIN and is_part else ""
    return name if asked.mode is not Mode.TRAIN else f"{name} ({trainable:,} parameters)"


def _render_stages(document: Report) -> RenderableType:
    usable, amount, step = document.device.usable_bytes, _choose_unit(document).format, choose_full_step(document)
    on_cpu, measured, beside = document.on_cpu, document.source == "measured", find_gpu_columns(document)
    shows_host = document.host_peak_bytes >= MIN_HOST_BYTES
    headers = ["allocated", "delta", "peak", "resident" if on_cpu else "reserved", *beside]
    headers += ["seconds" if measured else "on this GPU", *(["host peak"] * shows_host)]
    first = f"stage (step {step})" if step else "stage"
    made = make_table(first, *(f">{header}" for header in headers), ruled=True, optional=_OPTIONAL_COLUMNS)
    rows = fold_stages(document)
    peak = find_peak_row(document, rows)
    for position, row in enumerate(rows):
        fits = usable is None or (row.peak_allocated_bytes <= usable and not row.oom)
        if usable is not None and row.peak_allocated_bytes > usable:
            verdict = Text(f"{amount(row.peak_allocated_bytes - usable)} over", style="red")
        else:
            verdict = Text("out of memory", style="red") if row.oom else Text("fits")
        name = Text(row.name)
        if row.num_merged > 1:
            each = "each" if row.has_equal_deltas else "on average"
            name.append(f" x{row.num_merged}, {amount(row.delta_bytes // row.num_merged)} {each}", style="dim")
        if row.num_rounds > 1:
            name.append(f" (x{row.num_rounds})", style="dim")
        if position == peak:
            name.append("  <- peak", style="bold red" if not fits else "bold")
        fourth = row.resident_bytes if on_cpu else row.peak_reserved_bytes
        read = (fourth, *(getattr(row, attribute) for attribute in beside.values()))
        made.add_row(
            name,
            amount(row.allocated_bytes),
            amount(row.delta_bytes, sign=True),
            amount(row.peak_allocated_bytes),
            *("" if one is None else amount(one) for one in read),
            verdict if not measured else "" if row.seconds is None else f"{row.seconds:,.3f}",
            *([amount(row.peak_host_bytes)] * shows_host),
        )
    turns = ""
    if any(row.num_rounds > 1 for row in rows):
        turns = " (xN): these rows came N times, in turn; allocated and delta are of the last time."
    if on_cpu:
        what = "allocated: by torch's CPU allocator; resident: of the whole process, as last read in the stage"
        return Group(made, dim(f"{_choose_unit(document).name}. {what}.{turns}"))
    note = f"{_choose_unit(document).name}; peak: most allocated, reserved: most held from the driver in the stage"
    beside_it = f"the CUDA context{' and other processes' * measured}"
    note += f"; {format_bytes(usable or 0)} usable beside {beside_it}.{turns}"
    return Group(made, dim(note), *describe_gpu_differences(document))


def _render_verdict(document: Report) -> RenderableType:
    if document.program is None or not _has_own_exit_code(document.program):
        return _render_memory_verdict(document)
    code = f"The exit code {document.program.exit_code} is the script's own"
    note = Text(f"{code}, and says nothing of memory: the script left with it.")
    return Group(_render_memory_verdict(document), note)


def _render_memory_verdict(document: Report) -> RenderableType:
    verdict, device = document.verdict, document.device
    if document.on_cpu:
        resident = max((row.resident_bytes for row in document.stages if row.resident_bytes), default=None)
        process = "" if resident is None else f"; the process had up to {format_bytes(resident)} resident"
        most = format_bytes(document.peak.allocated_bytes)
        took = f"tensors took up to {most} of host memory{process}."
        if document.failure is None:
            return Text(f"\nMeasured: {took}")
        stopped = f"the run stopped in {document.failure.phase} with {document.failure.error}; until then {took}"
        return _label("Failed", "bold red", stopped)
    on = next((f" on {gpu.device}" for gpu in document.gpus if gpu.decides), "")
    on = next((f" on rank {row.rank}" for row in document.ranks if row.decides), on)
    need = f"{format_bytes(verdict.required_bytes)} with the CUDA context{on}"
    if document.failure is not None:
        failure = document.failure
        over, rest = "." if verdict.fits is None else ", which does not fit.", "The rest is not known."
        if failure.kind == FailureKind.REFUSED:
            label, seen = "Refused", f"{failure.message.removeprefix('not yet: ')}. What was simulated needs {need}"
        elif failure.kind == FailureKind.OTHER_RANK:
            label, seen = "Stopped", f"{failure.message}. It needed {need} until then"
        elif failure.kind in NOT_SIMULATED:
            what = failure.error if failure.op is None else f"{failure.op} ({failure.error})"
            stopped = f"the run stopped in {failure.phase}, at {what}"
            label, seen = "Not simulated", f"{stopped}. It needed {need} until then"
        else:
            stopped = f"the run stopped in {failure.phase} with {failure.error}"
            label, seen = "Failed", f"{stopped}; it needed {need} until then"
            rest = "What is above and below is the run up to there."
        return _label(label, "bold red", f"{seen}{over} {rest}")
    if verdict.fits is None:
        seen = f"it was stopped before a training step had ended, or a model been called; it needed {need} until then."
        return _label("Not known", "bold yellow", f"{seen} Give it more time.")
    beside = document.peak.device_used_bytes - document.peak.reserved_bytes  # the context
    usable = (device.total_bytes or 0) - beside if device.usable_bytes is None else device.usable_bytes
    spare = usable - (verdict.required_bytes - beside)
    if verdict.growth is not None and verdict.growth.runs_out and not verdict.host_over_bytes:
        return _render_exhaustion(verdict.growth, document.findings, need)
    if verdict.fits and verdict.first_caught is not None:
        return _render_fit_after_errors(verdict, verdict.first_caught, need, spare)
    if verdict.fits and not verdict.retries and spare >= 0:
        return _render_fit(document, need, spare).append(_format_growth(verdict.growth))
    if verdict.fits:
        sentence = f"{_describe_retries(verdict.retries)}. Without releasing its cache it would reserve {need}."
        return _label("Fits, with allocator retries", "bold yellow", sentence).append(_format_growth(verdict.growth))
    if verdict.host_over_bytes and verdict.oom_stage is None:
        over = f"{format_bytes(verdict.host_over_bytes)} more than there is of it (--host-memory)"
        held = f"{format_bytes(document.host_peak_bytes)} are held in host memory, {over}"
        return _label("Does not fit", "bold red", f"{held}. Of the GPU it needs {need}.")
    where = at_stage(verdict.oom_stage or "", verdict.oom_step or 0)
    ended = document.program is not None and document.program.ended == "refused"
    whole = "The script ended there; with that allocation it needs" if ended else "The whole run needs"
    tried, used = (format_bytes(size or 0) for size in (verdict.tried_to_allocate_bytes, verdict.in_use_bytes))
    number = verdict.out_of_memory_caught
    before = f" Before that {_describe_errors(number)}, and the script went on without what it had requested."
    text = (
        f"a real GPU runs out of memory in {where}, when it tries to allocate {tried} with {used} in use. "
        f"{whole} {need}.{before if number else ''} torch {'said' if ended else 'would say'}:"
    )
    message = (verdict.oom_message or "").partition(" If reserved ")
    return make_section(_label("Does not fit", "bold red", text), dim(message[0] + (" ..." if message[1] else "")))


def _render_exhaustion(growth: Growth, findings: Sequence[Finding], need: str) -> Text:
    """Return the verdict on a run whose memory grows until the GPU is full, with the step at which that happens."""
    seen = f"the {growth.steps_seen} steps that were run need {need}"
    planned = growth.program_steps
    end = "no end of its steps was seen" if planned is None else f"the script makes about {planned:,}"
    cause = next((f" {one.title.partition(': ')[2]}." for one in findings if one.id == "memory-growth"), "")
    grows = f"Memory grows by {format_bytes(growth.bytes_per_step)} a step:{cause}" if cause else ""
    sentence = f"runs out of memory at about step {growth.runs_out_step:,}; {seen}, and {end}. {grows}"
    return _label("Does not fit", "bold red", sentence.rstrip())


def _format_growth(growth: Growth | None) -> str:
    """Return how much memory grows per step, and the step up to which the run fits; "" without growth."""
    if growth is None:
        return ""
    last = "" if growth.runs_out_step is None else f" until about step {growth.runs_out_step:,}"
    about = "" if growth.program_steps == growth.steps_seen else "about "
    ends = "" if growth.program_steps is None else f"; the script ends after {about}step {growth.program_steps:,}"
    return f" It grows by {format_bytes(growth.bytes_per_step)} a step{last and ', and fits'}{last}{ends}."


def _label(label: str, style: str, sentence: str) -> Text:
    return Text(f"\n{label}: ", style=style).append(sentence, style="default")


def _render_certain_errors(document: Report) -> list[RenderableType]:
    """Return the findings that end the run on a real GPU even with enough memory; they are shown at the verdict."""
    known = ("does-not-fit", "run-failed", "memory-growth")  # findings that repeat the verdict
    errors = [one for one in document.findings if one.severity is Severity.ERROR and one.id not in known]
    return [Text("Fails on a real GPU: ", style="bold red").append(one.title, style="default") for one in errors]


def _describe_retries(retries: int) -> str:
    times = "once" if retries == 1 else f"{retries} times" if retries else "now and then"
    back = "the allocator releases what it holds and does not use, which takes time"
    return f"the GPU is full {times}, and the run goes on because {back}"


def _describe_errors(number: int) -> str:
    raised = "an out-of-memory error was" if number == 1 else f"{number} out-of-memory errors were"
    return f"{raised} raised and caught"


def _render_fit(document: Report, need: str, spare: int) -> Text:
    """Return the verdict on a run that fits; for several GPUs, also whether the headroom suffices for NCCL."""
    nccl = None if document.bridge is None else document.bridge.nccl_group_bytes
    if nccl is None:
        return _label("Fits", "bold green", f"needs {need}, {format_bytes(spare)} to spare.")
    least, most = nccl
    range_text = f"{format_bytes(least)} to {format_bytes(most)}"
    if spare >= most:
        left = f"{format_bytes(spare)} to spare, of which NCCL takes {range_text} a group where others measured it."
        return _label("Fits", "bold green", f"needs {need}, {left}")
    left = f"which leaves {format_bytes(spare)} to NCCL: where others measured it, a group takes {range_text}."
    return _label("Fits without headroom for NCCL", "bold yellow", f"needs {need}, {left}")


def _render_fit_after_errors(verdict: Verdict, first: CaughtError, need: str, spare: int) -> Text:
    """Return the verdict on a program that caught out-of-memory errors, and fits without the failed allocations."""
    number = verdict.out_of_memory_caught
    which = "" if number == 1 else ", the first"
    stage = at_stage(first.stage, first.step)
    where = f" at {short_source(first.source)}" if first.source else ""
    asked = f"{format_bytes(first.num_bytes)} were requested with {format_bytes(first.in_use_bytes)} in use"
    only_just = f"and fits, with allocator retries: {_describe_retries(verdict.retries)}"
    then = only_just if verdict.retries or spare < 0 else f"{format_bytes(spare)} to spare"
    went_on = f"{_describe_errors(number)}{which} in {stage}{where}, where {asked}; the script went on without it."
    sentence = f"{went_on} What it did instead needs {need}, {then}."
    return _label("Fits only without what was refused", "bold yellow", sentence)


def _render_categories(document: Report) -> RenderableType:
    total = document.peak.allocated_bytes
    amount = _choose_unit(document).format
    made = make_table("", ">", ">", "|bar", optional=("bar",))
    made.show_header = False
    for category, num_bytes in document.peak.categories.items():
        share = num_bytes / total
        made.add_row(category, amount(num_bytes), f"{share:.1%}", draw_bar(share, _BAR_WIDTH))
    where = at_stage(document.peak.stage, document.peak.step)
    return make_section(
        f"\nAt the peak, {format_bytes(total)} in {where}", made, *_render_workspaces(document), below=1
    )


def _render_workspaces(document: Report) -> list[RenderableType]:
    """Return notes on cuDNN's convolution workspaces: how far the peak depends on their unknown sizes."""
    found, total = document.peak.workspaces, document.peak.allocated_bytes
    if found is None:
        return []
    without = [dim(_REFUSED_WORKSPACES.format(found.refused))] if found.refused else []
    if found.max_peak_bytes - found.min_peak_bytes < _MIN_UNCERTAIN_SHARE * total:
        return [*without]
    rule = f"{format_bytes(found.num_bytes)} of it by the rule for workspaces of cuDNN's convolutions"
    least, most = format_bytes(found.min_peak_bytes), format_bytes(found.max_peak_bytes)
    return [dim(f"{rule}; the peak is {least} without any, {most} by their bound."), *without]


def _render_tensors(document: Report) -> RenderableType:
    unit = _choose_unit(document)
    made = make_table(f">{unit.name}", ">x", "|shape", "~what it is", optional=("shape", "x"))
    for tensor in merge_equal_tensors(document.peak.tensors)[:MAX_TENSORS]:
        shape = f"{format_shape(tensor.shape)} {tensor.dtype}"
        made.add_row(unit.format(tensor.num_bytes), str(tensor.count), shape, render_origin(tensor))
    return make_section("Largest tensors live at the peak", made, below=1)


def _render_findings(document: Report) -> RenderableType:
    if not document.findings:
        return Text("No findings.\n")
    found = (indent(_render_finding(number, finding), below=1) for number, finding in enumerate(document.findings, 1))
    return Group(make_heading("Findings, most expensive first"), *found)


def _render_finding(number: int, finding: Finding) -> RenderableType:
    title = Text(f"{number}. ").append(f"{finding.severity.value}: ", style=_SEVERITY_STYLE[finding.severity])
    lines = [title.append(finding.title), *(_render_evidence(evidence) for evidence in finding.evidence[:MAX_EVIDENCE])]
    if len(finding.evidence) > MAX_EVIDENCE:
        lines.append(dim(f"   and {len(finding.evidence) - MAX_EVIDENCE} more (--json lists all)"))
    if finding.fixes:
        lines.append(Text("   Suggested fixes: " + ", ".join(map(_format_fix_option, finding.fixes)), style="green"))
    return Group(*lines)


def _format_fix_option(name: str) -> str:
    """Return a fix as the value of `--fix`: its name, with `=N` if it needs a number."""
    fix = FIXES.get(name)
    return f"{name}=N" if fix is not None and fix.main_option in fix.required else name


def _render_evidence(evidence: Evidence) -> Text:
    text = Text("   - ").append(evidence.text)
    if evidence.source and short_source(evidence.source) not in evidence.text:
        text.append(f"  {short_source(evidence.source)}", style="dim")
    return text
