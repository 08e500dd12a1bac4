"""A script again and again, with remedies switched on from outside: `memprof run --ladder` and `--fix auto`.

Each run is a process of its own, `memprof run --beyond --fix ... --save FILE script`: a script leaves its process in a
state that another run should not find.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memprof.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.flows.account import analyze
from memprof.flows.ladder.climb import climb
from memprof.flows.ladder.runs import Runs
from memprof.flows.ladder.search import search
from memprof.remedies.fixes import Fix
from memprof.remedy_catalog import REMEDIES, Numerics, from_outside
from memprof.report.documents.report import Document
from memprof.script import Program, StopRule
from memprof.trace.events import Trace
from memprof.trace.io import load_trace
from memprof.units import spell_size

_SAID = "memprof: "


@dataclass(frozen=True, slots=True)
class Request:
    """What is run."""

    program: Program
    rule: StopRule
    gpu: Gpu
    alloc_conf: str | None = None
    """None: the environment's."""
    worst_batch: bool = False
    """Feed the largest batches first."""
    host_memory_bytes: int | None = None
    """None: it is not asked."""
    no_compile: bool = False
    """Run what the script gives to torch.compile eagerly."""
    no_stand_ins: bool = False
    """Find no package that is not installed."""

    def options(self) -> list[str]:
        """Of `memprof run`, before the script."""
        rule = self.rule
        found = (
            ["--gpu-vram", repr(self.gpu.total_bytes / 2**30)] if self.gpu.key == "custom" else ["--gpu", self.gpu.key]
        )
        # What patience would add is not the same in every run: all are to make the same steps.
        found += ["--until-exit"] if rule.steps is None else ["--steps", str(rule.steps)]
        found += [] if rule.seconds is None else ["--timeout", repr(rule.seconds)]
        found += [] if self.alloc_conf is None else ["--alloc-conf", self.alloc_conf]
        found += ["--worst-batch"] if self.worst_batch else []
        found += ["--no-compile"] if self.no_compile else []
        found += ["--no-stand-ins"] if self.no_stand_ins else []
        host = self.host_memory_bytes
        found += [] if host is None else ["--host-memory", spell_size(host)]
        return found


class ScriptRuns(Runs):
    """Runs of one script, with the remedies that can be switched on from outside."""

    def __init__(self, request: Request, from_outside: Sequence[str], progress: Callable[[str], None]) -> None:
        self._request = request
        self._from_outside = from_outside
        self._progress = progress
        super().__init__(request.gpu)

    def ahead(self, sets: Iterable[Sequence[Fix]]) -> None:
        """Nothing is: a script may write, and count on what its run before left."""

    def beside(self, fixes: Sequence[Fix], climb: Callable[[Runs], object]) -> None:
        """Nothing is, as above; and what a process has compiled is of no use to the next."""

    def check(self, fixes: Sequence[Fix]) -> None:
        """Raises UsageError if one of them cannot be switched on from outside."""
        for fix in fixes:
            if fix.remedy.name not in self._from_outside:
                raise UsageError("this remedy cannot be switched on from outside a script", value=fix.remedy.name)

    def on_now(self) -> frozenset[str]:
        """What the settings say; what the script has switched on itself is found out by trying."""
        settings = self.original.document.allocator.alloc_conf or ""
        compiles = self.original.trace.compiling is not None
        return frozenset(
            name
            for name, remedy in REMEDIES.items()
            if (remedy.alloc_conf and remedy.alloc_conf in settings) or (remedy.compiles and compiles)
        )

    def _alloc_conf(self, fixes: Sequence[Fix]) -> str | None:
        settings = self.original.document.allocator.alloc_conf
        return ",".join(filter(None, (settings, *(fix.remedy.alloc_conf for fix in fixes))))

    def _retold(self, trace: Trace, fixes: Sequence[Fix]) -> Trace:
        trace = super()._retold(trace, fixes)
        assert trace.facts.program is not None
        program = dataclasses.replace(trace.facts.program, fixes=tuple(map(str, fixes)))
        return dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, program=program))

    def _run(self, fixes: Sequence[Fix]) -> tuple[Trace, Document]:
        self._progress("running the script " + (f"with {', '.join(map(str, fixes))}" if fixes else "as it is"))
        return run_alone(self._request, fixes)


def run_alone(request: Request, fixes: Sequence[Fix] = ()) -> tuple[Trace, Document]:
    """The script in a process of its own, past a full card.

    Raises:
        MemprofError: it fails.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-") as folder:
        kept = Path(folder) / "run.memprof"
        options = ["--beyond", *request.options(), "--save", str(kept)]
        options += ["--fix", ",".join(map(str, fixes))] if fixes else []
        done = subprocess.run(
            [sys.executable, "-m", "memprof", "run", *options, *request.program.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode not in (0, 3) or not kept.exists():
            raise _failure(done.returncode, done.stderr, fixes)
        trace = load_trace(kept)
    return trace, analyze(trace)


def _failure(code: int, said: str, fixes: Sequence[Fix]) -> MemprofError:
    """What a run that failed says."""
    lines = said.rstrip().splitlines()
    own = next((at for at in reversed(range(len(lines))) if lines[at].startswith(_SAID)), None)
    if own is not None and code == UsageError.exit_code:
        value = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  value:")), None)
        hint = next((line.partition(":")[2].strip() for line in lines[own:] if line.startswith("  hint:")), None)
        return UsageError(lines[own].removeprefix(_SAID), value=value, hint=hint)
    names = ",".join(map(str, fixes))
    how = f"with {', '.join(map(str, fixes))}" if fixes else "as it is"
    own_words = [line for line in lines if line.strip() and not line.startswith(("Saved: ", _SAID))]
    return MemprofError(
        f"the script fails {how}",
        value=own_words[-1].strip() if own_words else f"exit code {code}",
        hint=f"memprof run {f'--fix {names} ' if names else ''}shows its output and the report so far",
    )


def script_ladder(request: Request, progress: Callable[[str], None]) -> tuple[Trace, Document]:
    """The script as it is, and a ladder of remedies: see `climb`.

    Raises:
        MemprofError: the script fails as it is.
    """
    names = from_outside()
    return climb(ScriptRuns(request, names, progress), names)


def script_search(request: Request, progress: Callable[[str], None]) -> tuple[Trace, Document]:
    """The script with the cheapest set of remedies that fits the card: see `search`.

    Raises:
        MemprofError: the script fails as it is.
    """
    names = from_outside()
    exact = [name for name in names if REMEDIES[name].numerics is Numerics.EXACT]
    tiers = (("the same numbers", exact), ("forward and backward in bfloat16", names))
    return search(ScriptRuns(request, names, progress), tiers)
