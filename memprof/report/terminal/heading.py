"""The heading of a report on a run: command, GPU, and a description of the model or the script."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.report import Report
from memprof.report.terminal.console import make_heading
from memprof.spec import Mode
from memprof.trace.facts import ProgramFacts, Target
from memprof.units import format_count, format_ranges, gib


def render_heading(document: Report) -> RenderableType:
    """Return the heading of a report: command, GPU, and a description of the run."""
    device, target = document.device, document.target
    kind = "simulated on a virtual" if document.source == "simulated" else "measured on"
    total = f"{gib(device.total_bytes or 0)} GiB"
    memory = "" if device.total_bytes is None or total in device.name else f" ({total})"  # "custom GPU with 8.00 GiB"
    if device.unified_bytes is not None and device.unified_bytes == device.total_bytes:
        memory = f" ({gib(device.total_bytes)} GiB, shared with the CPU)"
    elif device.backend == "mps":  # whose name in the catalog has the size
        memory = f", {gib(device.total_bytes or 0)} GiB of it for the GPU"
    elif device.unified_bytes is not None:
        memory = (
            f" ({gib(device.unified_bytes)} GiB shared with the CPU, {gib(device.total_bytes or 0)} GiB for the GPU)"
        )
    lines = [make_heading("memprof", f" {document.command}: {kind} {device.name.removeprefix('custom ')}{memory}")]
    if document.rank is not None:
        rank, size = document.rank.rank, document.rank.world_size
        ranks = format_ranges(row.rank for row in document.ranks)
        text = f"ranks {ranks} of {size}, together; shown in full: rank {rank}"
        if document.rank.alike:
            text = f"{size} ranks, one of each kind run alone; shown in full: rank {rank}"
        lines.append(Text(text if ranks else f"rank {rank} of {size}, alone: the others are taken to be like it"))
    if document.gpus:
        lines.append(Text(f"{len(document.gpus)} such GPUs in one process; shown in full: {document.gpu}"))
    if target:
        lines.append(Text(_describe_target(target)))
    if document.program is not None:
        lines.append(Text(_describe_program(document.program)))
    return Group(*lines)


MAX_STEPS = 1000  # of a script that --until-exit is offered for: more would not end soon

_TEXT_BY_ENDING = {
    "steps": "stopped after {steps}{rest}",
    "ready": "stopped when its engine was ready for requests (--until-exit goes on)",
    "exit": "ran to its end{counted}",
    "timeout": "stopped by --timeout {begun}",
    "error": "failed by itself {begun}",
    "not simulated": "stopped where it cannot be simulated, {begun}",
    "refused": "stopped where memory ran out; what it does after that was not run",
    "another rank": "stopped with the other ranks, {begun}",
    "interrupted": "interrupted {begun}",
}


def _describe_program(program: ProgramFacts) -> str:
    num_steps = program.steps
    steps = "1 training step" if num_steps == 1 else f"{num_steps or 'no'} training steps"
    fixes = f", with {', '.join(program.fixes)}" if program.fixes else ""
    planned = program.planned_steps or 0
    rest = f" of about {planned:,}" if planned > MAX_STEPS else "; --until-exit runs all of it"
    own_code = f"ended by itself with exit code {program.exit_code}{{counted}}"
    counted = f", {steps}" * bool(num_steps)
    ending = own_code if has_own_exit_code(program) else _TEXT_BY_ENDING[program.ended]
    begun = f"after training step {num_steps} began" if num_steps else "before any training step"
    return (
        f"{shlex.join(program.command)}{fixes}: {ending.format(steps=steps, counted=counted, begun=begun, rest=rest)}"
    )


def has_own_exit_code(program: ProgramFacts) -> bool:
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
