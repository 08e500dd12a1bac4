"""`memprof run`: execute a script, unmodified, on a virtual GPU, and say where its memory goes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from memprof.cli.child import continue_in_child, send_exit_code
from memprof.cli.exits import ExitCode
from memprof.cli.interrupt import restore_interrupts
from memprof.cli.options import FixOptions, reuse_option
from memprof.cli.output import CaptureOptions, choose_exit_code, print_patch
from memprof.cli.progress import Progress
from memprof.cli.streams import echo, protect_streams, report_error
from memprof.errors import MemprofError, UsageError
from memprof.run_spec import RunSpec
from memprof.spec import option

if TYPE_CHECKING:
    from memprof.fixes.chosen import ChosenFix
    from memprof.script import EndReason, Program, StopRule
    from memprof.trace.events import Failure

EXAMPLES = """
memprof run --gpu rtx-4090 train.py --epochs 1
memprof run --worst-batch --gpu-vram 16 train.py
memprof run --steps 200 --save run.memprof train.py
memprof run --ranks all torchrun --nproc-per-node 8 train.py
"""
MAIN_OPTIONS = (
    "command", "gpu", "gpu_vram_bytes", "steps", "until_exit", "worst_batch", "ranks", "fix", "ladder", "suggest_patch",
    "largest", "save", "html", "full", "as_json", "quiet", "help_all",
)  # fmt: skip
SETTINGS = {"allow_interspersed_args": False}  # arguments after the script's name are passed to the script


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunSpec, FixOptions, CaptureOptions):
    """Options of `memprof run`: for the script, and for its report."""

    module: bool = option(False, "Script", "SCRIPT is the name of a module, as for `python -m`.", flag="-m")
    suggest_patch: bool = option(
        False, "Fixes", "Suggest a diff of the script's own lines that removes the cause, and run a copy with it; the "
        "script is not changed.",
    )  # fmt: skip
    lengths: str | None = reuse_option("lengths", panel="")

    def build_spec(self) -> RunSpec:
        """Return the options that determine the run. Raises UsageError: a fix needs a package that is not installed."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(RunSpec)}
        fixes = () if self.fix is None or self.is_search else tuple(map(str, _parse_installed_fixes(self.fix)))
        return RunSpec(**values | {"fixes": fixes})

    def build_stop_rule(self) -> StopRule:
        """Return the rule that stops the script. Raises UsageError: options exclude each other, or are out of range."""
        if self.lengths is not None:
            hint = "leave it out: with --steps 200 the report says what its own batches reserve"
            raise UsageError("--lengths cannot change what a script feeds its model", value=self.lengths, hint=hint)
        if self.steps is not None and self.until_exit:
            raise UsageError(
                "give --steps or --until-exit, not both", value=f"--steps {self.steps}", hint="leave one out"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError("--timeout must be longer", value=self.timeout, hint="give seconds, more than 0")
        from memprof.script import StopRule

        if self.steps is None and not self.until_exit:
            return StopRule(2, self.timeout, continues_past_steps=True, stops_at_ready=True)
        return StopRule(self.steps, self.timeout)


def run(
    request: RunOptions,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.")
    ] = None,
) -> None:
    """Run a training script as it is on a virtual GPU, and say where its memory goes.

    Options of memprof stand before the script, everything after it is the script's. It is stopped after its second
    training step, when memory has reached its steady state; later where further steps are cheap (10,000 allocations
    and frees), and while memory grows from step to step (up to 200,000), so that a leak is seen to run out. With
    --steps 200, what is reserved over steps whose batches differ. With --json, what it prints goes to stderr. Exit code
    0: it fits; 3: it does not; 1: no verdict, for something cannot be simulated, or too little was seen; if the script
    fails by itself, its own (1 for 2, 3 and 4).
    """
    if not command:
        raise UsageError("no script is given", hint="for instance: memprof run --gpu rtx-4090 train.py --epochs 1")
    from memprof.script import read_program

    program = read_program(command, is_module=request.module)
    is_search = request.ladder or request.is_search or request.largest is not None
    if request.ranks is not None and is_search:
        hint = "leave out --ladder, --fix auto and --largest, or --ranks"
        raise UsageError("a ladder and a search run one rank", value=f"--ranks {request.ranks}", hint=hint)
    rank_options = {"--gpus": request.gpus, "--nodes": request.nodes, "--rank": request.rank}
    flags = [f"{flag} {value}" for flag, value in rank_options.items() if value not in (None, int(flag != "--rank"))]
    if flags and (is_search or request.device != "virtual"):
        hint = f"leave out --ladder, --fix auto, --largest and --device, or {flags[0].split()[0]}"
        raise UsageError("several GPUs are virtual ones, and a ladder has one", value=" ".join(flags), hint=hint)
    if request.shown_gpu is not None and not 0 <= request.shown_gpu < (request.gpus or request.shown_gpu + 1):
        hint = "GPUs count from 0" + (f", to {request.gpus - 1}" if request.gpus else "")
        raise UsageError("there is no such GPU", value=f"--gpu-index {request.shown_gpu}", hint=hint)
    if request.suggest_patch and (is_search or request.ranks is not None or request.device != "virtual"):
        hint = "leave out --ladder, --fix auto, --largest, --ranks and --device"
        raise UsageError("a patch is tried in runs of one rank on the virtual GPU", value="--suggest-patch", hint=hint)
    if request.fix is not None and request.ladder:
        raise UsageError("--ladder chooses fixes itself", value=f"--fix {request.fix}", hint="give --fix or --ladder")
    request.check_largest(request.device)
    has_ranks = request.ranks is not None or _has_measured_ranks(program, request)
    runner = _run_ladder if is_search else _run_ranks if has_ranks else _run_script
    # What does not exist is an error before the fork, and before torch is imported.
    program.check()
    _check_ranks(program, request)
    stop_rule = request.build_stop_rule()
    request.build_spec()
    from memprof.flows.gpus import resolve_spec_settings

    resolve_spec_settings(request)
    continue_in_child(as_json=request.as_json)
    raise typer.Exit(runner(program, stop_rule, request))


def _check_ranks(program: Program, request: RunOptions) -> None:
    """Raise UsageError if a rank does not exist; which ranks a launcher starts is known only with torch."""
    if program.has_launcher:
        return
    from memprof.script.launchers import ProcessSelection, parse_ranks, start_without_launcher

    rank = request.rank if request.ranks is None else None  # with --ranks it is one of them
    selection = ProcessSelection(rank, request.gpus, request.nodes)
    start = start_without_launcher(program.name, program.arguments, program.is_module, selection)
    if request.ranks is not None:
        parse_ranks(request.ranks, start.size)


def _run_script(program: Program, stop_rule: StopRule, request: RunOptions) -> int:
    from memprof.flows.script import run_script
    from memprof.script import EndReason
    from memprof.trace.events import FailureKind

    old_threads, folder = frozenset(threading.enumerate()), os.getcwd()
    restore_interrupts()
    with protect_streams(to_stderr=request.as_json):
        result = run_script(program, stop_rule, request.build_spec())
    outcome, document = result.outcome, result.document
    if isinstance(outcome.error, UsageError):  # a fix does not apply to the script's model
        raise outcome.error
    as_json = request.as_json and document is None
    if isinstance(outcome.error, MemprofError):  # an operation cannot be simulated; the error names the line
        report_error(outcome.error, as_json=as_json, exit_code=outcome.exit_code)
    elif outcome.error is not None:
        from memprof.script.program import print_error

        print_error(outcome.error)
    code = _map_script_exit_code(outcome.exit_code)
    if document is None:
        failure, code = result.trace.failure, code or int(ExitCode.FAILED)
        if failure is None or failure.kind is not FailureKind.REFUSED:
            report_error(_build_error(outcome.ended, outcome.exit_code, failure), as_json=as_json, exit_code=code)
        elif not isinstance(outcome.error, MemprofError):
            report_error(MemprofError(failure.message, hint=failure.hint), as_json=as_json, exit_code=code)
        return code
    if request.suggest_patch:
        from memprof.flows.patch.suggest import suggest_patch

        with Progress(quiet=request.quiet) as progress:
            patch = suggest_patch(program, stop_rule, request.build_spec(), document, folder, progress)
        document = dataclasses.replace(document, patch=patch)
    _print_separator(request)
    request.print_run(result.trace, document)
    if document.patch is not None and not (request.as_json or request.quiet):
        print_patch(document.patch)
    code = int(ExitCode.DOES_NOT_FIT) if outcome.ended is EndReason.REFUSED else code or choose_exit_code(document)
    if outcome.ended is not EndReason.EXIT:
        _exit_with_threads(old_threads, code)
    return code


def _has_measured_ranks(program: Program, request: RunOptions) -> bool:
    """Return whether a launcher starts several processes on real GPUs, which communicate."""
    if request.device == "virtual" or not program.has_launcher:
        return False
    from memprof.script import ScriptOutcome

    launch = program.start()
    return not isinstance(launch, ScriptOutcome) and launch.size > 1  # an outcome: the launcher's own --help


def _run_ranks(program: Program, stop_rule: StopRule, request: RunOptions) -> int:
    from memprof.flows.ranks import RanksRun, run_ranks
    from memprof.script import EndReason

    restore_interrupts()
    with protect_streams(to_stderr=request.as_json):
        job = run_ranks(program, stop_rule, request.build_spec())
    if not isinstance(job, RanksRun):  # the launcher's own --help
        code = _map_script_exit_code(job.exit_code) or int(ExitCode.FAILED)
        report_error(_build_error(job.ended, job.exit_code), as_json=request.as_json, exit_code=code)
        return code
    if isinstance(job.problem, UsageError):
        raise job.problem
    code = _map_script_exit_code(job.exit_code) or (int(ExitCode.FAILED) if job.problem else 0)
    as_json = request.as_json and job.document is None
    echo(job.traceback, err=True, nl=False)
    if job.problem is not None:
        report_error(job.problem, as_json=as_json, exit_code=code)
    if job.document is None:
        code = code or int(ExitCode.FAILED)
        if job.problem is None:
            report_error(_build_error(job.ended, job.exit_code), as_json=as_json, exit_code=code)
        return code
    _print_separator(request)
    request.print_run(job.trace, job.document)
    return int(ExitCode.DOES_NOT_FIT) if job.ended is EndReason.REFUSED else code or choose_exit_code(job.document)


def _print_separator(request: RunOptions) -> None:
    """Print a line between what the script has printed and the report, on a terminal, which shows both."""
    if sys.stdout.isatty() and not (request.as_json or request.quiet):
        echo("─" * shutil.get_terminal_size().columns)


_SIMULATION_GAP_HINT = (
    "this is a gap of the virtual GPU, not an error of the script: measure the run on a GPU, and report it to memprof"
)


def _build_error(reason: EndReason, exit_code: int, failure: Failure | None = None) -> MemprofError:
    """Return the error for a script that ended without a tensor on the GPU; `failure` is its exception, if any."""
    from memprof.script import EndReason
    from memprof.trace.events import NOT_SIMULATED

    problem = "no verdict: nothing was put on the GPU"
    if failure is not None and reason in (EndReason.ERROR, EndReason.NOT_SIMULATED):
        place = failure.caller or failure.source
        location = "" if place is None else f" at {place}"
        is_gap = failure.kind in NOT_SIMULATED
        event = "the simulation stopped" if is_gap else "the script failed"
        return MemprofError(
            problem,
            value=f"{event}{location}: {failure.error}: {failure.message}",
            hint=failure.hint or (_SIMULATION_GAP_HINT if is_gap else "correct its error, which is above"),
        )
    ending, hint = {
        EndReason.TIMEOUT: ("the script was stopped by --timeout", "give it more seconds"),
        EndReason.INTERRUPTED: ("the script was interrupted", None),
        EndReason.ERROR: ("the script failed", "correct its error, which is above"),
    }.get(
        reason,
        (
            f"the script ended with exit code {exit_code}",
            "have it move its model to the GPU: 'cuda', or 'mps' with --gpu m4-max-64gb, 'xpu' with --gpu arc-b580; a "
            "process that it starts, or leaves behind as a daemon, is not seen",
        ),
    )
    return MemprofError(problem, value=ending, hint=hint)


def _parse_installed_fixes(names: str) -> list[ChosenFix]:
    """Return the fixes of `--fix`. Raises UsageError: their packages are not installed."""
    from memprof.fixes.catalog import check_installed
    from memprof.fixes.chosen import parse_fixes

    fixes = parse_fixes(names)
    check_installed(None, [fix.fix for fix in fixes])
    return fixes


def _map_script_exit_code(script_code: int) -> int:
    """Return a script's exit code, or 1 for codes with a meaning in memprof (usage error, does not fit, differs)."""
    reserved_codes = (ExitCode.USAGE_ERROR, ExitCode.DOES_NOT_FIT, ExitCode.DIFFERS)
    return int(ExitCode.FAILED) if script_code in reserved_codes else script_code


def _exit_with_threads(old_threads: Collection[threading.Thread], exit_code: int) -> None:
    """End the process if threads besides `old_threads` keep running, for which Python would wait at exit."""
    threads = [thread for thread in threading.enumerate() if thread not in old_threads and not thread.daemon]
    for thread in threads:
        thread.join(timeout=1.0)
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        send_exit_code(exit_code)
        os._exit(exit_code)


def _run_ladder(program: Program, stop_rule: StopRule, request: RunOptions) -> int:
    from memprof.flows.ladder import scripts

    if request.device != "virtual":
        hint = "leave out --device, or --ladder"
        raise UsageError("a ladder runs on the virtual GPU", value=f"--device {request.device}", hint=hint)
    from memprof.flows.gpus import find_host_bytes, find_spec_gpu

    spec = request.build_spec()
    if request.is_search and spec.host_memory_bytes is None:
        spec = spec.edit(host_memory_bytes=find_host_bytes(find_spec_gpu(spec)))
    with Progress(quiet=request.quiet) as progress:
        if request.largest is not None:
            from memprof.flows.limit import find_largest_for_script

            trace, document = find_largest_for_script(program, spec, request.largest, progress)
        else:
            search = scripts.search_script_fixes if request.is_search else scripts.build_script_ladder
            trace, document = search(program, spec, progress)
    request.print_run(trace, document)
    return choose_exit_code(document)
