"""Repeated runs of a script with fixes switched on from outside: `memprof run --ladder` and `--fix auto`.

Each run is a new process, `memprof run --beyond --fix ... --save FILE script`: a script changes the state of its
process, which the next run must not see.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from memprof.command_line import make_run_command
from memprof.errors import MemprofError, UsageError
from memprof.findings.evidence import is_inference
from memprof.fixes.catalog import FIXES, Numerics, script_fix_names
from memprof.fixes.chosen import ChosenFix
from memprof.flows.account import analyze, replace_allocator_settings
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.ladder.build import build_ladder
from memprof.flows.ladder.runs import Runs, run_with_ladder
from memprof.flows.ladder.search import search_fixes
from memprof.report.documents.report import Report
from memprof.run_spec import SETTINGS_VARIABLE, RunSpec
from memprof.script import Program
from memprof.trace.events import Trace
from memprof.trace.io import load_trace

_ERROR_PREFIX = "memprof: "
_GROWING = ("memory-growth", "evaluation-accumulates", "evaluation-with-gradients")  # findings of what piles up


class ScriptRuns(Runs):
    """Runs of one script, with fixes that can be switched on from outside."""

    def __init__(self, program: Program, spec: RunSpec, progress: Callable[[str], None]) -> None:
        self._program, self._spec, self._progress = program, spec, progress
        super().__init__(find_spec_gpu(spec))

    def format_command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command of the run with `fixes`; unless the run fits, with --beyond, as it was run."""
        spec = self._add_fixes(fixes)
        return make_run_command(spec if fits else spec.edit(beyond=True), self._program.command)

    def _add_fixes(self, fixes: Sequence[ChosenFix]) -> RunSpec:
        return self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes)))

    def run_in_parallel(self, fix_sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Do nothing: a script may depend on files of its previous run, so runs are made one by one."""

    def check_fixes(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if a fix cannot be switched on from outside, acts too late to change where memory ends, or
        is for training, and the script only infers.

        Fixes of models are applied at a model's first call (fixes/script_fixes.py)."""
        super().check_fixes(fixes)
        for fix in fixes:
            if fix.fix.name not in script_fix_names():
                raise UsageError("this fix cannot be switched on from outside a script", value=fix.fix.name)
            if self.ends_before_calls and not fix.fix.alloc_conf:
                raise UsageError("it acts from the first call of a model, before which memory runs out")
            if fix.fix.training_only and is_inference(self.original.trace):
                raise UsageError("it is for training, and this script only infers")

    @functools.cached_property
    def ends_before_calls(self) -> bool:
        """Return whether memory runs out before a pass of a model begins."""
        ledger = self.original.complete_report().ledger
        if ledger is None or ledger.out_of_memory is None:
            return False
        passes = (begin for begin, phase in ledger.trace.list_phase_begins() if phase.kind.computes)
        return ledger.out_of_memory.event < next(passes, len(ledger.trace.events))

    def in_force(self) -> frozenset[str]:
        """Return the fixes seen in allocator settings and compilation; others that the script has on are unknown."""
        settings = self.original.document.allocator.alloc_conf or ""
        compiles = self.original.trace.compiling is not None
        return frozenset(
            name
            for name, fix in FIXES.items()
            if (fix.alloc_conf and fix.alloc_conf in settings) or (fix.compiles and compiles)
        )

    def _replay_with_fixes(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        settings = (self.original.document.allocator.alloc_conf, *(fix.fix.alloc_conf for fix in fixes))
        return _record_spec(replace_allocator_settings(trace, ",".join(filter(None, settings))), self._add_fixes(fixes))

    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        self._progress("running the script " + (f"with {', '.join(map(str, fixes))}" if fixes else "unchanged"))
        return run_script_process(self._program, self._add_fixes(fixes))


def run_script_process(program: Program, spec: RunSpec) -> tuple[Trace, Report]:
    """Run the script in a new process, with --beyond; raise MemprofError if the script fails."""
    with tempfile.TemporaryDirectory(prefix="memprof-") as folder:
        capture_file = Path(folder) / "run.memprof"
        command = make_run_command(spec.edit(beyond=True), program.command, "--save", str(capture_file))
        process = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            env={**os.environ, SETTINGS_VARIABLE: "off"},  # the settings file is already in the spec
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode not in (0, 3) or not capture_file.exists():
            raise _build_error(process.returncode, process.stderr, program, spec)
        trace = _record_spec(load_trace(capture_file), spec)
    return trace, analyze(trace)


def _record_spec(trace: Trace, spec: RunSpec) -> Trace:
    """Return a run's trace with the options and fixes of `spec` recorded as those of the run."""
    facts = trace.facts
    assert facts.program is not None
    program = dataclasses.replace(facts.program, fixes=spec.fixes, asked=spec)
    return dataclasses.replace(trace, facts=dataclasses.replace(facts, program=program))


def _build_error(exit_code: int, stderr: str, program: Program, spec: RunSpec) -> MemprofError:
    """Return the error of a failed run, from its exit code and standard error."""
    lines = stderr.rstrip().splitlines()
    own = next((index for index in reversed(range(len(lines))) if lines[index].startswith(_ERROR_PREFIX)), None)
    if own is not None and exit_code == UsageError.exit_code:
        value = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  value:")), None)
        hint = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  hint:")), None)
        return UsageError(lines[own].removeprefix(_ERROR_PREFIX), value=value, hint=hint)
    condition = f"with {', '.join(spec.fixes)}" if spec.fixes else "unchanged"
    output_lines = [line for line in lines if line.strip() and not line.startswith(("Saved: ", _ERROR_PREFIX))]
    return MemprofError(
        f"the script fails {condition}",
        value=output_lines[-1].strip() if output_lines else f"exit code {exit_code}",
        hint=f"its output and the report so far: {make_run_command(spec, program.command)}",
    )


def build_script_ladder(program: Program, spec: RunSpec, progress: Callable[[str], None]) -> tuple[Trace, Report]:
    """Return the script's run without fixes, with a ladder of fixes; raise MemprofError if the script fails."""
    return build_ladder(ScriptRuns(program, spec, progress), script_fix_names())


def _grows(runs: ScriptRuns) -> bool:
    """Return whether the script does not fit because something grows in it, without which it would fit."""
    if runs.original.fits:
        return False
    report = runs.original.complete_report()
    too_much = report.peak.allocated_bytes - (report.device.usable_bytes or 0)
    growing = [one for one in report.findings if one.id in _GROWING]
    return any(one.is_decisive or (one.num_bytes is not None and one.num_bytes >= too_much) for one in growing)


def search_script_fixes(program: Program, spec: RunSpec, progress: Callable[[str], None]) -> tuple[Trace, Report]:
    """Return the script's run with the cheapest set of fixes that fits; raise MemprofError if the script fails."""
    names = script_fix_names()
    exact = [name for name in names if FIXES[name].numerics is Numerics.EXACT]
    tiers = (("the same numbers", exact), ("forward and backward in bfloat16", names))
    runs = ScriptRuns(program, spec, progress)
    if _grows(runs):
        reason = (
            "what grows from step to step, or from call to call, is the script's own to keep less of, as said above; "
            "a fix only delays the end, and none was tried (--fix NAME and --ladder try them)"
        )
        return run_with_ladder(runs, (), reason)
    trace, document = search_fixes(runs, tiers)
    if runs.ends_before_calls:
        reason = (
            f"{document.ladder_reason}; all others act from the first call of a model, before which memory runs out"
        )
        document = dataclasses.replace(document, ladder_reason=reason)
    return trace, document
