"""The report on a run as text for a terminal: stages, verdict, categories at the peak, largest tensors, findings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.findings import Evidence, Finding, Severity
from memprof.findings.exhaustion import Growth
from memprof.fixes.catalog import FIXES
from memprof.ledger.caught_errors import CaughtError
from memprof.ledger.stages import format_stage
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
    """Return a report for a terminal; `explain` adds the assumptions, `quiet` leaves only the verdict."""
    if quiet:
        return _render_verdict(document) if document.limit is None else Text(format_limit(document.limit))
    parts = [render_heading(document), _render_stages(document), _render_verdict(document)]
    parts += _render_cause(document)
    parts += _render_certain_errors(document)
    parts += [Text(f"Note: {text}") for text in document.assumptions if text.endswith(NO_STUBS_HINT) and not explain]
    unit = _choose_unit(document)
    parts += [render_ranks(document.ranks, unit, on_cpu=document.on_cpu)] if document.ranks else []
    parts += [render_gpus(document.gpus, unit)] if document.gpus else []
    parts += [] if document.batches is None else [render_batches(document.batches, unit)]
    parts += [render_steps(document.steps, unit)] if document.steps else []
    parts += [] if document.limit is None else [render_limit(document.limit, document.device.total_bytes or 0)]
    parts.append(_render_categories(document))
    if document.over_time is not None:
        parts.append(CategoryTimeline(document.over_time, unit, format_stage(document.peak.stage, document.peak.step)))
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
    memory = "" if device.total_bytes is None else f" ({gib(device.total_bytes)} GiB)"
    lines = [make_heading("memprof", f" {document.command}: {kind} {device.name}{memory}")]
    if document.rank is not None:
        rank, size = document.rank.rank, document.rank.world_size
        ranks = format_ranges(row.rank for row in document.ranks)
        text = f"ranks {ranks} of {size}, together; in full, rank {rank}:"
        if document.rank.alike:
            text = f"{size} ranks, one of each kind run alone; in full, rank {rank}:"
        lines.append(Text(text if ranks else f"rank {rank} of {size}, alone: the others are taken to be like it"))
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
    num_steps = program.steps
    steps = "1 training step" if num_steps == 1 else f"{num_steps or 'no'} training steps"
    fixes = f", with {', '.join(program.fixes)}" if program.fixes else ""
    own_code = f"ended by itself with exit code {program.exit_code}, {{steps}}"
    ending = own_code if _has_own_exit_code(program) else _TEXT_BY_ENDING[program.ended]
    begun = f"after {steps} had begun" if num_steps else "before any training step"
    unseen = "" if program.evaluated else ", before any evaluation"
    return f"{shlex.join(program.command)}{fixes}: {ending.format(steps=steps, begun=begun, unseen=unseen)}"


def _has_own_exit_code(program: ProgramFacts) -> bool:
    """Return whether the script itself exited with a nonzero code, which memprof returns whatever its verdict."""
    return program.ended == "exit" and bool(program.exit_code)


def _describe_target(target: Target) -> str:
    spec, parts = target.asked, [target.model]
    if target.num_parameters:  # a run that failed early lacks the number
        parts[0] += f", {format_count(target.num_parameters)} parameters ({target.num_parameters:,})"
    if target.task == "image-classification":
        parts.append(f"batch {spec.batch_size} image{'s' if spec.batch_size > 1 else ''}")
    elif target.context_length is not None:
        up_to = "up to " if target.sequence_lengths else ""
        parts.append(f"batch {spec.batch_size} x {up_to}{target.context_length:,} tokens")
    elif target.num_parameters:
        parts.append(f"batch {spec.batch_size}")
    amp = f" with {spec.amp} autocast" if spec.amp else ""
    if target.dtype is not None:
        parts.append(f"{target.dtype}{amp}")
    parts.append(_describe_trained_part(target))
    if spec.mode is Mode.TRAIN:
        impl = f" ({spec.optimizer_impl})" if spec.optimizer_impl else ""
        parts += [
            "no optimizer" if spec.optimizer == "none" else f"{spec.optimizer}{impl}",
            "activation checkpointing" * spec.activation_checkpointing,
            f"{spec.gradient_accumulation} micro-batches" * (spec.gradient_accumulation > 1),
            "gradients zeroed, not freed" * (spec.zero_grad == "zero"),
            "evaluation after each step" * spec.evaluate,
        ]
    else:
        parts.append(f"inference, {spec.new_tokens:,} new tokens" if spec.new_tokens else "inference")
    parts += [f"{spec.attention} attention" if spec.attention else "", "compiled" * spec.compile, *spec.fixes]
    parts.append(f"allocator {target.alloc_conf}" if target.alloc_conf else "")
    return ", ".join(part for part in parts if part)


def _describe_trained_part(target: Target) -> str:
    """Return what is trained: the adapter, the NPT components or a number of parameters; "" if all parameters are."""
    spec, trainable = target.asked, target.num_trainable_parameters
    if spec.adapter:
        name = f"{spec.adapter.upper().replace('LORA', 'LoRA')} of rank {spec.lora_rank}"
    elif spec.npt:
        sums = f"{spec.npt_num_ranks} rank-1 updates, " if spec.npt_num_ranks else ""
        name = f"NPT {spec.npt}, {sums}rank {spec.npt_rank}"
    else:
        is_part = trainable is not None and trainable < (target.num_parameters or 0)
        return f"{trainable:,} trained" if spec.mode is Mode.TRAIN and is_part else ""
    return name if spec.mode is not Mode.TRAIN else f"{name} ({trainable:,} parameters)"


def _render_stages(document: Report) -> RenderableType:
    usable, format_size, step = document.device.usable_bytes, _choose_unit(document).format, choose_full_step(document)
    on_cpu, is_measured, gpu_columns = document.on_cpu, document.source == "measured", find_gpu_columns(document)
    shows_host = document.host_peak_bytes >= MIN_HOST_BYTES
    headers = ["allocated", "delta", "peak", "resident" if on_cpu else "reserved", *gpu_columns]
    headers += ["seconds" if is_measured else "on this GPU", *(["host peak"] * shows_host)]
    title = f"stage (step {step})" if step else "stage"
    table = make_table(title, *(f">{header}" for header in headers), ruled=True, optional=_OPTIONAL_COLUMNS)
    rows = fold_stages(document)
    peak_index = find_peak_row(document, rows)
    for i, row in enumerate(rows):
        fits = usable is None or (row.peak_allocated_bytes <= usable and not row.oom)
        if usable is not None and row.peak_allocated_bytes > usable:
            verdict = Text(f"{format_size(row.peak_allocated_bytes - usable)} over", style="red")
        else:
            verdict = Text("out of memory", style="red") if row.oom else Text("fits")
        name = Text(row.name)
        if row.num_merged > 1:
            suffix = "each" if row.has_equal_deltas else "on average"
            name.append(f" x{row.num_merged}, {format_size(row.delta_bytes // row.num_merged)} {suffix}", style="dim")
        if row.num_rounds > 1:
            name.append(f" (x{row.num_rounds})", style="dim")
        if i == peak_index:
            name.append("  <- peak", style="bold red" if not fits else "bold")
        held_bytes = row.resident_bytes if on_cpu else row.peak_reserved_bytes
        sizes = (held_bytes, *(getattr(row, attribute) for attribute in gpu_columns.values()))
        table.add_row(
            name,
            format_size(row.allocated_bytes),
            format_size(row.delta_bytes, sign=True),
            format_size(row.peak_allocated_bytes),
            *("" if size is None else format_size(size) for size in sizes),
            verdict if not is_measured else "" if row.seconds is None else f"{row.seconds:,.3f}",
            *([format_size(row.peak_host_bytes)] * shows_host),
        )
    rounds_note = ""
    if any(row.num_rounds > 1 for row in rows):
        rounds_note = " (xN): these rows came N times, in turn; allocated and delta are of the last time."
    if on_cpu:
        legend = "allocated: by torch's CPU allocator; resident: of the whole process, as last read in the stage"
        return Group(table, dim(f"{_choose_unit(document).name}. {legend}.{rounds_note}"))
    note = f"{_choose_unit(document).name}; peak: most allocated, reserved: most held from the driver in the stage"
    excluded = f"the CUDA context{' and other processes' * is_measured}"
    note += f"; {format_bytes(usable or 0)} usable beside {excluded}.{rounds_note}"
    return Group(table, dim(note), *describe_gpu_differences(document))


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
        peak = format_bytes(document.peak.allocated_bytes)
        usage = f"tensors took up to {peak} of host memory{process}."
        if document.failure is None:
            return Text(f"\nMeasured: {usage}")
        reason = f"the run stopped in {document.failure.phase} with {document.failure.error}; until then {usage}"
        return _label("Failed", "bold red", reason)
    suffix = next((f" on {gpu.device}" for gpu in document.gpus if gpu.decides), "")
    suffix = next((f" on rank {row.rank}" for row in document.ranks if row.decides), suffix)
    need = f"{format_bytes(verdict.required_bytes)} with the CUDA context{suffix}"
    if document.failure is not None:
        failure = document.failure
        fit_note, rest = "." if verdict.fits is None else ", which does not fit.", "The rest is not known."
        if failure.kind == FailureKind.REFUSED:
            label, reason = "Refused", f"{failure.message.removeprefix('not yet: ')}. What was simulated needs {need}"
        elif failure.kind == FailureKind.OTHER_RANK:
            label, reason = "Stopped", f"{failure.message}. It needed {need} until then"
        elif failure.kind in NOT_SIMULATED:
            cause = failure.error if failure.op is None else f"{failure.op} ({failure.error})"
            reason = f"the run stopped in {failure.phase}, at {cause}"
            label, reason = "Not simulated", f"{reason}. It needed {need} until then"
        else:
            reason = f"the run stopped in {failure.phase} with {failure.error}"
            label, reason = "Failed", f"{reason}; it needed {need} until then"
            rest = "What is above and below is the run up to there."
        return _label(label, "bold red", f"{reason}{fit_note} {rest}")
    if verdict.fits is None:
        text = f"it was stopped before a training step had ended, or a model been called; it needed {need} until then."
        return _label("Not known", "bold yellow", f"{text} Give it more time.")
    context_bytes = document.peak.device_used_bytes - document.peak.reserved_bytes  # the context
    usable_bytes = (device.total_bytes or 0) - context_bytes if device.usable_bytes is None else device.usable_bytes
    spare_bytes = usable_bytes - (verdict.required_bytes - context_bytes)
    if verdict.growth is not None and verdict.growth.runs_out and not verdict.host_over_bytes:
        return _render_exhaustion(verdict.growth, document.findings, need)
    if verdict.fits and verdict.first_caught is not None:
        return _render_fit_after_errors(verdict, verdict.first_caught, need, spare_bytes)
    if verdict.fits and not verdict.retries and spare_bytes >= 0:
        return _render_fit(document, need, spare_bytes).append(_format_growth(verdict.growth))
    if verdict.fits:
        reason = f"{_describe_retries(verdict.retries)}. Without releasing its cache it would reserve {need}."
        return _label("Fits, with allocator retries", "bold yellow", reason).append(_format_growth(verdict.growth))
    if verdict.host_over_bytes and verdict.oom_stage is None:
        fit_note = f"{format_bytes(verdict.host_over_bytes)} more than there is of it (--host-memory)"
        usage = f"{format_bytes(document.host_peak_bytes)} are held in host memory, {fit_note}"
        return _label("Does not fit", "bold red", f"{usage}. Of the GPU it needs {need}.")
    where = format_stage(verdict.oom_stage or "", verdict.oom_step or 0)
    was_refused = document.program is not None and document.program.ended == "refused"
    need_intro = "The script ended there; with that allocation it needs" if was_refused else "The whole run needs"
    tried, used = (format_bytes(size or 0) for size in (verdict.tried_to_allocate_bytes, verdict.in_use_bytes))
    num_caught = verdict.out_of_memory_caught
    caught_note = f" Before that {_describe_errors(num_caught)}, and the script went on without what it had requested."
    text = (
        f"a real GPU runs out of memory in {where}, when it tries to allocate {tried} with {used} in use. "
        f"{need_intro} {need}.{caught_note if num_caught else ''} torch {'said' if was_refused else 'would say'}:"
    )
    message = (verdict.oom_message or "").partition(" If reserved ")
    return make_section(_label("Does not fit", "bold red", text), dim(message[0] + (" ..." if message[1] else "")))


def _render_exhaustion(growth: Growth, findings: Sequence[Finding], need: str) -> Text:
    """Return the verdict on a run whose memory grows until the GPU is full, with the step at which that happens."""
    steps_text = f"the {growth.steps_seen} steps that were run need {need}"
    num_steps = growth.program_steps
    end_text = "no end of its steps was seen" if num_steps is None else f"the script makes about {num_steps:,}"
    cause = next((f" {f.title.partition(': ')[2]}." for f in findings if f.id == "memory-growth"), "")
    growth_text = f"Memory grows by {format_bytes(growth.bytes_per_step)} a step:{cause}" if cause else ""
    sentence = f"runs out of memory at about step {growth.runs_out_step:,}; {steps_text}, and {end_text}. {growth_text}"
    return _label("Does not fit", "bold red", sentence.rstrip())


def _format_growth(growth: Growth | None) -> str:
    """Return how much memory grows per step, and the step up to which the run fits; "" without growth."""
    if growth is None:
        return ""
    until = "" if growth.runs_out_step is None else f" until about step {growth.runs_out_step:,}"
    about = "" if growth.program_steps == growth.steps_seen else "about "
    end = "" if growth.program_steps is None else f"; the script ends after {about}step {growth.program_steps:,}"
    return f" It grows by {format_bytes(growth.bytes_per_step)} a step{until and ', and fits'}{until}{end}."


def _label(label: str, style: str, sentence: str) -> Text:
    return Text(f"\n{label}: ", style=style).append(sentence, style="default")


def _render_cause(document: Report) -> list[RenderableType]:
    """Return the finding without which the run would fit, if there is one; it is shown at the verdict."""
    first = document.findings[:1]
    return [Text("Cause: ", style="bold").append(one.title, style="default") for one in first if one.is_decisive]


def _render_certain_errors(document: Report) -> list[RenderableType]:
    """Return the findings that end the run on a real GPU even with enough memory; they are shown at the verdict."""
    repeated_ids = ("does-not-fit", "run-failed", "memory-growth")  # findings that repeat the verdict
    errors = [f for f in document.findings if f.severity is Severity.ERROR and f.id not in repeated_ids]
    return [Text("Fails on a real GPU: ", style="bold red").append(f.title, style="default") for f in errors]


def _describe_retries(retries: int) -> str:
    frequency = "once" if retries == 1 else f"{retries} times" if retries else "now and then"
    reason = "the allocator releases what it holds and does not use, which takes time"
    return f"the GPU is full {frequency}, and the run goes on because {reason}"


def _describe_errors(count: int) -> str:
    subject = "an out-of-memory error was" if count == 1 else f"{count} out-of-memory errors were"
    return f"{subject} raised and caught"


def _render_fit(document: Report, need: str, spare: int) -> Text:
    """Return the verdict on a run that fits; for several GPUs, also whether the headroom suffices for NCCL."""
    nccl = None if document.bridge is None else document.bridge.nccl_group_bytes
    if nccl is None:
        return _label("Fits", "bold green", f"needs {need}, {format_bytes(spare)} to spare.")
    min_bytes, max_bytes = nccl
    range_text = f"{format_bytes(min_bytes)} to {format_bytes(max_bytes)}"
    if spare >= max_bytes:
        rest = f"{format_bytes(spare)} to spare, of which NCCL takes {range_text} a group where others measured it."
        return _label("Fits", "bold green", f"needs {need}, {rest}")
    rest = f"which leaves {format_bytes(spare)} to NCCL: where others measured it, a group takes {range_text}."
    return _label("Fits without headroom for NCCL", "bold yellow", f"needs {need}, {rest}")


def _render_fit_after_errors(verdict: Verdict, first: CaughtError, need: str, spare_bytes: int) -> Text:
    """Return the verdict on a program that caught out-of-memory errors, and fits without the failed allocations."""
    num_caught = verdict.out_of_memory_caught
    first_note = "" if num_caught == 1 else ", the first"
    stage = format_stage(first.stage, first.step)
    where = f" at {short_source(first.source)}" if first.source else ""
    request = f"{format_bytes(first.num_bytes)} were requested with {format_bytes(first.in_use_bytes)} in use"
    retries_text = f"and fits, with allocator retries: {_describe_retries(verdict.retries)}"
    need_note = retries_text if verdict.retries or spare_bytes < 0 else f"{format_bytes(spare_bytes)} to spare"
    errors_text = f"{_describe_errors(num_caught)}{first_note} in {stage}{where}, where {request}"
    sentence = f"{errors_text}; the script went on without it. What it did instead needs {need}, {need_note}."
    return _label("Fits only without what was refused", "bold yellow", sentence)


def _render_categories(document: Report) -> RenderableType:
    total_bytes = document.peak.allocated_bytes
    format_size = _choose_unit(document).format
    table = make_table("", ">", ">", "|bar", optional=("bar",))
    table.show_header = False
    for category, num_bytes in document.peak.categories.items():
        share = num_bytes / total_bytes
        table.add_row(category, format_size(num_bytes), f"{share:.1%}", draw_bar(share, _BAR_WIDTH))
    where = format_stage(document.peak.stage, document.peak.step)
    return make_section(
        f"\nAt the peak, {format_bytes(total_bytes)} in {where}", table, *_render_workspaces(document), below=1
    )


def _render_workspaces(document: Report) -> list[RenderableType]:
    """Return notes on how much the peak depends on the unknown sizes of cuDNN's convolution workspaces."""
    workspaces, total_bytes = document.peak.workspaces, document.peak.allocated_bytes
    if workspaces is None:
        return []
    refused_notes = [dim(_REFUSED_WORKSPACES.format(workspaces.refused))] if workspaces.refused else []
    if workspaces.max_peak_bytes - workspaces.min_peak_bytes < _MIN_UNCERTAIN_SHARE * total_bytes:
        return [*refused_notes]
    rule_text = f"{format_bytes(workspaces.num_bytes)} of it by the rule for workspaces of cuDNN's convolutions"
    min_peak, max_peak = format_bytes(workspaces.min_peak_bytes), format_bytes(workspaces.max_peak_bytes)
    return [dim(f"{rule_text}; the peak is {min_peak} without any, {max_peak} by their bound."), *refused_notes]


def _render_tensors(document: Report) -> RenderableType:
    unit = _choose_unit(document)
    table = make_table(f">{unit.name}", ">x", "|shape", "~what it is", optional=("shape", "x"))
    for tensor in merge_equal_tensors(document.peak.tensors)[:MAX_TENSORS]:
        shape = f"{format_shape(tensor.shape)} {tensor.dtype}"
        table.add_row(unit.format(tensor.num_bytes), str(tensor.count), shape, render_origin(tensor))
    return make_section("Largest tensors live at the peak", table, below=1)


def _render_findings(document: Report) -> RenderableType:
    if not document.findings:
        return Text("No findings.\n")
    views = (indent(_render_finding(number, finding), below=1) for number, finding in enumerate(document.findings, 1))
    return Group(make_heading("Findings, most important first"), *views)


def _render_finding(number: int, finding: Finding) -> RenderableType:
    title = Text(f"{number}. ").append(f"{finding.severity.value}: ", style=_SEVERITY_STYLE[finding.severity])
    lines = [title.append(finding.title), *(_render_evidence(evidence) for evidence in finding.evidence[:MAX_EVIDENCE])]
    if len(finding.evidence) > MAX_EVIDENCE:
        lines.append(dim(f"   and {len(finding.evidence) - MAX_EVIDENCE} more (--json lists all)"))
    if finding.suggestions:
        lines.append(Text("   Suggested fixes:", style="green"))
        lines += [Text(f"   - {suggestion.text}", style="green") for suggestion in finding.suggestions]
    elif finding.fixes:
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
