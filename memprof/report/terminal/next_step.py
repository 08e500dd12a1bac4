"""The next command suggested at the end of a report: its purpose and its command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from memprof.command_line import format_options, make_profile_command, make_run_command
from memprof.findings import Severity
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS, script_fix_names
from memprof.report.documents.report import Report
from memprof.report.terminal.console import ShellCommand, dim, make_section
from memprof.report.terminal.heading import MAX_STEPS
from memprof.report.terminal.verdict import has_unseen_batches
from memprof.spec import TargetSpec
from memprof.trace.events import NOT_SIMULATED, FailureKind
from memprof.trace.facts import ProgramFacts, Target

if TYPE_CHECKING:  # a report of a run needs neither
    from memprof.report.documents.analysis import Analysis
    from memprof.report.documents.comparison import Comparison

MORE_STEPS = 20  # Steps to run for a script stopped earlier: enough to show whether memory grows.
_FINDINGS_HELP = ("read what each finding means", "memprof help findings")
_FIXES_HELP = ("read what each fix does and costs", "memprof help fixes")
_RUN_HELP = ("read how a script is run, and what may stop it", "memprof help run")
HELP_STEPS = (_FINDINGS_HELP, _FIXES_HELP, _RUN_HELP)  # pages, which are nothing to do on a first screen
_MAX_ROWS = 1000  # Value of --top: more rows than a comparison has.


def render_next_step(suggestion: tuple[str, str] | None) -> list[RenderableType]:
    """Return a suggested command (its purpose and command line) for a terminal; an empty list for None."""
    if suggestion is None:
        return []
    purpose, command = suggestion
    return [make_section(dim(f"Next, {purpose}:"), ShellCommand(command))]


def choose_next_step(document: Report) -> tuple[str, str] | None:
    """Return purpose and command line of a command to try after a run; None if there is nothing to suggest."""
    if document.source != "simulated":
        return _FINDINGS_HELP if document.findings else None
    if document.program is not None:
        return _choose_step_after_run(document, document.program)
    if document.command == "profile" and document.target is not None:
        return _choose_step_after_profile(document, document.target)
    return None


def choose_step_after_analyze(document: Analysis, file: Path) -> tuple[str, str]:
    """Return purpose and command line of a command to try after the analysis of `file`."""
    command = ["memprof", "analyze", str(file)]
    if any(device.what_if is not None for device in document.devices):
        return "show the sizes of the blocks", shlex.join([*command, "--by", "size"])
    if document.ran_out:
        moment = next(device.moment.what for device in document.devices if device.ooms)
        if moment != "oom":
            return "show what was live when memory ran out", shlex.join([*command, "--at", "oom"])
    free_bytes = max(device.fragmentation_at_peak.free_bytes for device in document.devices)
    if free_bytes and not any(device.state_only for device in document.devices):
        purpose = "try whether expandable segments would reserve less"
        return purpose, shlex.join([*command, "--alloc-conf", EXPANDABLE_SEGMENTS])
    return "show which modules hold it", shlex.join([*command, "--by", "module"])


def choose_step_after_compare(document: Comparison, files: tuple[Path, ...]) -> tuple[str, str] | None:
    """Return purpose and command line of a command to try after a comparison; None if `files` agree or are unknown."""
    if document.within or not files:
        return None
    return "show every row that differs", shlex.join(
        ["memprof", "compare", *map(str, files), "--full", "--top", str(_MAX_ROWS)]
    )


def _choose_step_after_profile(document: Report, target: Target) -> tuple[str, str] | None:
    spec = target.asked
    if document.failure is not None:
        return "read what cannot be simulated", "memprof help limitations"
    if document.fits_in_memory is False:
        if fitting := [row.command for row in document.ladder if row.fits and row.fixes]:
            return "show the first row that fits in full", fitting[0]
        if document.ladder or spec.fixes:
            return _suggest_recommend(spec)
        return _describe_search(document), make_profile_command(spec, "--fix", "auto")
    if document.limit is not None:
        largest = [run.command for run in document.limit.runs if run.number == document.limit.largest]
        return ("show the report of the largest", largest[0]) if largest else None
    if spec.parallel is not None or spec.gpus > 1 or spec.lengths is not None:
        return "read how it runs on other GPUs", "memprof help parallel"
    return "find the largest batch that fits", make_profile_command(spec, "--largest", "batch-size")


# Fields of a run's spec that are options of `memprof recommend`.
_RECOMMEND_FIELDS = (
    "model", "model_is_size", "trust_remote_code", "mode", "adapter", "lora_rank", "lora_targets", "context_length",
    "gpu", "gpu_vram_bytes", "gpus", "host_memory_bytes",
)  # fmt: skip
# Fields that `memprof recommend` searches or ignores; it does not apply to a run with other options.
_SEARCHED_FIELDS = (
    "dtype", "amp", "quantize", "double_quant", "batch_size", "gradient_accumulation", "optimizer", "optimizer_impl",
    "zero_grad", "activation_checkpointing", "attention", "compile", "compile_mode", "compile_layers", "alloc_conf",
    "dataset_batches", "steps", "parallel", "rank", "fixes",
)  # fmt: skip


def _suggest_recommend(spec: TargetSpec) -> tuple[str, str]:
    """Return purpose and command line of `memprof recommend` for the model, mode and GPUs of a run, or of a help page
    if `memprof recommend` lacks other options of the run."""
    covered_spec = TargetSpec(**{name: getattr(spec, name) for name in _RECOMMEND_FIELDS})
    if covered_spec != spec.edit(**{name: getattr(covered_spec, name) for name in _SEARCHED_FIELDS}):
        return _FIXES_HELP
    purpose = "find what fits this GPU, or how many of them it takes"
    return purpose, shlex.join(["memprof", "recommend", *format_options(covered_spec)])


def _has_local_fix(document: Report) -> bool:
    """Return whether the first finding warns of something, or is the cause, that a change of one place takes away."""
    first = document.findings[0] if document.findings else None
    return first is not None and first.edit is not None and (first.is_decisive or first.severity is not Severity.NOTE)


def _list_suggested_fixes(document: Report) -> set[str]:
    """Return the names of the fixes that findings suggest, where any suggestion fits only of those that do; changes of
    the program's own code have none."""
    suggestions = [suggestion for finding in document.findings for suggestion in finding.suggestions]
    if any(suggestion.fits for suggestion in suggestions):
        return {suggestion.fix.partition("=")[0] for suggestion in suggestions if suggestion.fits and suggestion.fix}
    return {name for finding in document.findings for name in finding.fixes}


def _describe_search(document: Report) -> str:
    """Return the purpose of `--fix auto`, which may find nothing where no suggestion makes the run fit."""
    suggestions = [suggestion for finding in document.findings for suggestion in finding.suggestions]
    if suggestions and not any(suggestion.fits for suggestion in suggestions):
        return "try combinations of --fix options"
    return "find the cheapest set of --fix options that fits"


def _choose_step_after_run(document: Report, program: ProgramFacts) -> tuple[str, str] | None:
    is_single = document.rank is None and not document.gpus
    spec = program.asked
    if spec is None:
        return _FINDINGS_HELP if document.findings else None

    def run(*more: str, **changes: object) -> str:
        return make_run_command(spec.edit(**changes), program.command, *more)

    if document.failure is not None:
        if document.failure.kind in (FailureKind.REFUSED, *NOT_SIMULATED):
            return "read what cannot be simulated", "memprof help limitations"
        return _RUN_HELP
    if document.verdict.fits is None and is_single:
        return "run the whole script", run(until_exit=True, steps=None, timeout=None)
    if is_single and document.patch is None and not (document.ladder or program.fixes) and _has_local_fix(document):
        edits = [one for one in document.findings if one.edit is not None and one.is_decisive]
        return f"write {'these changes' if len(edits) > 1 else 'this change'} as a diff", run("--suggest-patch")
    growth = document.verdict.growth
    if growth is not None and growth.runs_out:  # no fix from outside takes a leak away
        return "run it until memory runs out", run(until_exit=True, steps=None, timeout=None)
    if document.fits_in_memory is False and is_single:
        if fitting := [row.command for row in document.ladder if row.fits and row.fixes]:
            return "show the first row that fits in full", fitting[0]
        if not document.ladder and not program.fixes:
            causes = [finding for finding in document.findings if finding.is_decisive]
            options = {one.fix.partition("=")[0] for cause in causes for one in cause.suggestions if one.fix}
            if causes and options.isdisjoint(script_fix_names()):
                return None  # the change is the program's
            suggested = _list_suggested_fixes(document)
            if document.paged_bytes or not suggested.isdisjoint(script_fix_names()):
                return _describe_search(document), run("--fix", "auto")
            return _FIXES_HELP if suggested else _FINDINGS_HELP
    if document.fits_in_memory is False:
        return _FIXES_HELP
    evaluation = program.misses_evaluation, "check that its evaluation fits too"
    unseen = (
        (program.misses_calls, "check that all of these calls fit"),
        evaluation,
        (program.misses_unfreezing, "check that it fits with these parameters"),
        (program.misses_model, "check that the next model fits too"),
        (program.idle_optimizers, "check that the steps of the other optimizer fit too"),
    )
    purpose = next((purpose for is_missed, purpose in unseen if is_missed), None)
    if is_single and purpose is not None and (program.planned_steps or 0) <= MAX_STEPS:
        return purpose, run(until_exit=True, steps=None, timeout=None)
    # A run of all steps of a long training would not end.
    if is_single and program.misses_evaluation and (program.evaluation_step or MAX_STEPS) < MAX_STEPS:
        return evaluation[1], run(steps=(program.evaluation_step or 0) + 1, timeout=None)
    if is_single and has_unseen_batches(document):
        if program.planned_steps is not None and program.planned_steps <= MAX_STEPS:
            return "check that all of its steps fit", run(until_exit=True, steps=None, timeout=None)
        if not spec.worst_batch:
            return "find what the largest batch needs", run(worst_batch=True)
    if is_single and program.ended == "steps" and program.steps < MORE_STEPS:
        return "check whether later steps need more", run(steps=MORE_STEPS)
    return _FINDINGS_HELP if document.findings else None
