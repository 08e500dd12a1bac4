"""A script run again and again, with fixes switched on from outside: `memprof run --ladder` and `--fix auto`.

Each run is a process of its own, `memprof run --beyond --fix ... --save FILE script`: a script leaves its process in a
state that another run should not find.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from memprof.command_line import run_command
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import FIXES, Numerics, script_fix_names
from memprof.fixes.chosen import ChosenFix
from memprof.flows.account import analyze, with_settings
from memprof.flows.gpus import find_gpu_of
from memprof.flows.ladder.climb import climb
from memprof.flows.ladder.runs import Runs
from memprof.flows.ladder.search import search
from memprof.report.documents.report import Report
from memprof.run_spec import SETTINGS, RunSpec
from memprof.script import Program
from memprof.trace.events import Trace
from memprof.trace.io import load_trace

_SAID = "memprof: "


class ScriptRuns(Runs):
    """Runs of one script, with the fixes that can be switched on from outside."""

    def __init__(self, program: Program, spec: RunSpec, progress: Callable[[str], None]) -> None:
        self._program, self._spec, self._progress = program, spec, progress
        super().__init__(find_gpu_of(spec))

    def command(self, fixes: Sequence[ChosenFix], *, fits: bool | None) -> str:
        """Return the command that makes the run with these: where it does not fit, past the full GPU as it was run."""
        spec = self._spec_with(fixes)
        return run_command(spec if fits else spec.edit(beyond=True), self._program.command)

    def _spec_with(self, fixes: Sequence[ChosenFix]) -> RunSpec:
        return self._spec.edit(fixes=(*self._spec.fixes, *map(str, fixes)))

    def make(self, sets: Iterable[Sequence[ChosenFix]]) -> None:
        """Make none before it is requested: a script may write, and count on what its run before left."""

    def check(self, fixes: Sequence[ChosenFix]) -> None:
        """Raise UsageError if one of them cannot be switched on from outside."""
        for fix in fixes:
            if fix.fix.name not in script_fix_names():
                raise UsageError("this fix cannot be switched on from outside a script", value=fix.fix.name)

    def active_fixes(self) -> frozenset[str]:
        """Return what the settings say; what the script has switched on itself is found out by trying."""
        settings = self.original.document.allocator.alloc_conf or ""
        compiles = self.original.trace.compiling is not None
        return frozenset(
            name
            for name, fix in FIXES.items()
            if (fix.alloc_conf and fix.alloc_conf in settings) or (fix.compiles and compiles)
        )

    def _trace_with(self, trace: Trace, fixes: Sequence[ChosenFix]) -> Trace:
        settings = (self.original.document.allocator.alloc_conf, *(fix.fix.alloc_conf for fix in fixes))
        return _as_requested_by(with_settings(trace, ",".join(filter(None, settings))), self._spec_with(fixes))

    def _run(self, fixes: Sequence[ChosenFix]) -> tuple[Trace, Report]:
        self._progress("running the script " + (f"with {', '.join(map(str, fixes))}" if fixes else "unchanged"))
        return run_alone(self._program, self._spec_with(fixes))


def run_alone(program: Program, spec: RunSpec) -> tuple[Trace, Report]:
    """Run the script in a process of its own, past a full GPU; raise MemprofError if it fails."""
    with tempfile.TemporaryDirectory(prefix="memprof-") as folder:
        kept = Path(folder) / "run.memprof"
        command = run_command(spec.edit(beyond=True), program.command, "--save", str(kept))
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            env={**os.environ, SETTINGS: "off"},  # what a file says is in the spec
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode not in (0, 3) or not kept.exists():
            raise _failure(done.returncode, done.stderr, program, spec)
        trace = _as_requested_by(load_trace(kept), spec)
    return trace, analyze(trace)


def _as_requested_by(trace: Trace, spec: RunSpec) -> Trace:
    """Return a run's trace as that of one that was requested by `spec`."""
    facts = trace.facts
    assert facts.program is not None
    program = dataclasses.replace(facts.program, fixes=spec.fixes, asked=spec)
    return dataclasses.replace(trace, facts=dataclasses.replace(facts, program=program))


def _failure(code: int, said: str, program: Program, spec: RunSpec) -> MemprofError:
    """Return the error of a run that failed, as it says it."""
    lines = said.rstrip().splitlines()
    own = next((at for at in reversed(range(len(lines))) if lines[at].startswith(_SAID)), None)
    if own is not None and code == UsageError.exit_code:
        value = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  value:")), None)
        hint = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  hint:")), None)
        return UsageError(lines[own].removeprefix(_SAID), value=value, hint=hint)
    how = f"with {', '.join(spec.fixes)}" if spec.fixes else "unchanged"
    own_words = [line for line in lines if line.strip() and not line.startswith(("Saved: ", _SAID))]
    return MemprofError(
        f"the script fails {how}",
        value=own_words[-1].strip() if own_words else f"exit code {code}",
        hint=f"its output and the report so far: {run_command(spec, program.command)}",
    )


def script_ladder(program: Program, spec: RunSpec, progress: Callable[[str], None]) -> tuple[Trace, Report]:
    """Return the script's run as it is, with a ladder of fixes; raise MemprofError if it fails."""
    return climb(ScriptRuns(program, spec, progress), script_fix_names())


def script_search(program: Program, spec: RunSpec, progress: Callable[[str], None]) -> tuple[Trace, Report]:
    """Return the script's run with the cheapest set of fixes that fits; raise MemprofError if it fails as it is."""
    names = script_fix_names()
    exact = [name for name in names if FIXES[name].numerics is Numerics.EXACT]
    tiers = (("the same numbers", exact), ("forward and backward in bfloat16", names))
    return search(ScriptRuns(program, spec, progress), tiers)
