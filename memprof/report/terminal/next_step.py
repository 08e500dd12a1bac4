"""The command to try next, at the end of a report: what it would say, and the line to paste."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from memprof.catalog import find_gpu
from memprof.command_line import profile_command
from memprof.errors import UsageError
from memprof.remedy_catalog import EXPANDABLE_SEGMENTS
from memprof.report.documents.report import Document
from memprof.report.terminal.console import Command, dim, section
from memprof.spec import TargetSpec
from memprof.trace.events import FailureKind
from memprof.trace.facts import ProgramFacts, Target
from memprof.units import spell_size

if TYPE_CHECKING:  # a report of a run needs neither
    from memprof.report.documents.analysis import Analysis
    from memprof.report.documents.comparison import Comparison

MORE_STEPS = 20
"""Of a script that was stopped after fewer: enough to see whether memory goes on growing."""
_FINDINGS = ("what each finding means", "memprof help findings")
_ALL = 1000
"""Rows of a table: more than any comparison has."""


def render_next(found: tuple[str, str] | None) -> list[RenderableType]:
    """The line and what it is for; nothing where nothing is known to try."""
    if found is None:
        return []
    what, command = found
    return [section(dim(f"Next, {what}:"), Command(command))]


def next_step(document: Document) -> tuple[str, str] | None:
    """What to see after a report, and the command that shows it; None where no command line made it."""
    if document.source != "simulated":
        return _FINDINGS if document.findings else None
    if document.program is not None:
        return _after_run(document, document.program)
    if document.command == "profile" and document.target is not None:
        return _after_profile(document, document.target)
    return None


def after_analysis(document: Analysis, file: Path) -> tuple[str, str]:
    """What to see after the analysis of `file`."""
    words = ["memprof", "analyze", str(file)]
    if any(device.what_if is not None for device in document.devices):
        return "the sizes of the blocks", shlex.join([*words, "--by", "size"])
    if document.ran_out:
        moment = next(device.moment.what for device in document.devices if device.ooms)
        if moment != "oom":
            return "what was alive when memory ran out", shlex.join([*words, "--at", "oom"])
    held = max(device.fragmentation_at_peak.free_bytes for device in document.devices)
    if held and not any(device.state_only for device in document.devices):
        what = "whether expandable segments would reserve less"
        return what, shlex.join([*words, "--alloc-conf", EXPANDABLE_SEGMENTS])
    return "which modules hold it", shlex.join([*words, "--by", "module"])


def after_comparison(document: Comparison, files: tuple[Path, ...]) -> tuple[str, str] | None:
    """What to see after the comparison of two files; None where they agree, or are not files."""
    if document.within or not files:
        return None
    return "every row that differs", shlex.join(["memprof", "compare", *map(str, files), "--top", str(_ALL)])


def _after_profile(document: Document, target: Target) -> tuple[str, str] | None:
    spec = target.asked
    if document.failure is not None:
        return "what cannot be simulated", "memprof help limitations"
    if document.verdict.fits is False:
        fitting = next((rung for rung in document.ladder if rung.fits and rung.remedies), None)
        if fitting is not None:
            command = f"{profile_command(spec.edit(fixes=()))} --fix {','.join(fitting.remedies)}"
            return "the first row that fits, in full", command
        if document.ladder or spec.fixes:
            return "what would fit this card, or how many of them it takes", _recommend(spec)
        return "the remedies that make it fit at the least cost", f"{profile_command(spec)} --fix auto"
    if document.limit is not None:
        largest = next((run for run in document.limit.runs if run.number == document.limit.largest), None)
        return None if largest is None else ("the report of the largest", largest.command)
    if spec.parallel is not None or spec.gpus > 1 or spec.lengths is not None:
        return "what it would do on other cards", "memprof help parallel"
    return "the largest batch that fits", f"{profile_command(spec)} --largest batch-size"


def _recommend(spec: TargetSpec) -> str:
    """`memprof recommend` for the model, the goal and the card of a run; the rest is searched."""
    asked = TargetSpec(
        model=spec.model, model_is_size=spec.model_is_size, trust_remote_code=spec.trust_remote_code, mode=spec.mode,
        adapter=spec.adapter, context_length=spec.context_length, gpu=spec.gpu, gpu_vram_bytes=spec.gpu_vram_bytes,
    )  # fmt: skip
    return profile_command(asked).replace("profile", "recommend", 1)


def _after_run(document: Document, program: ProgramFacts) -> tuple[str, str] | None:
    card = _card(document)
    alone = document.rank is None and not document.cards

    def run(*options: str) -> str:
        settings = document.allocator.alloc_conf
        conf = ["--alloc-conf", settings] if settings and document.allocator.alloc_conf_from == "--alloc-conf" else []
        fixes = ["--fix", ",".join(program.fixes)] if program.fixes and "--fix" not in options else []
        return shlex.join(["memprof", "run", *card, *conf, *fixes, *options, *program.command])

    if document.failure is not None:
        if document.failure.kind == FailureKind.REFUSED:
            return "what cannot be simulated", "memprof help limitations"
        return "how a script is run, and what may stop it", "memprof help run"
    if document.verdict.fits is None and alone:
        return "all of it", run("--until-exit")
    if document.verdict.fits is False and alone:
        fitting = next((rung for rung in document.ladder if rung.fits and rung.remedies), None)
        if fitting is not None:
            return "the first row that fits, in full", run("--fix", ",".join(fitting.remedies))
        if not document.ladder and not program.fixes:
            return "the remedies that make it fit at the least cost", run("--fix", "auto")
    if document.verdict.fits is False:
        return "what each remedy does and costs", "memprof help remedies"
    if alone and program.ended == "steps" and program.steps < MORE_STEPS:
        return "whether later steps take more", run("--steps", str(MORE_STEPS))
    return _FINDINGS if document.findings else None


def _card(document: Document) -> list[str]:
    total = document.device.total_bytes
    try:
        card = find_gpu(document.device.name)
    except UsageError:
        card = None
    if card is not None and card.total_bytes == total:
        return ["--gpu", card.key]
    return [] if total is None else ["--gpu-vram", spell_size(total)]
