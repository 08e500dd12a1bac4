"""The result of `--suggest-patch` as text for a terminal: the changes, their effect, and what did not help.

The diff itself is printed as it is, after this text: rich would cut its long lines, and replace its tabs.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from memprof.report.documents.patch import PatchedNeed, SuggestedPatch
from memprof.report.terminal.console import dim, make_section
from memprof.report.terminal.stage_names import describe_stage
from memprof.units import format_bytes


def render_patch(patch: SuggestedPatch) -> RenderableType:
    """Return the changes of a patch with their effect, and those that are not part of it, with the reason."""
    if patch.after is None:
        return make_section("No patch", *map(Text, patch.tried or ("no finding names one place to change",)))
    lines = [*patch.changes, _format_effect(patch.before, patch.after)]
    left_out = [dim(f"left out: {reason}") for reason in patch.tried]
    return make_section("Suggested patch (not applied)", *map(Text, lines), *left_out, below=1)


def _format_effect(before: PatchedNeed, after: PatchedNeed) -> str:
    """Return the peaks before and after, and what becomes of the verdict."""
    allocated = f"{format_bytes(before.allocated_bytes)} -> {format_bytes(after.allocated_bytes)} allocated"
    reserved = f"{format_bytes(before.reserved_bytes)} -> {format_bytes(after.reserved_bytes)} reserved"
    verdicts = [_format_verdict(before), _format_verdict(after)]
    verdict = verdicts[1] if verdicts[0] == verdicts[1] else " -> ".join(verdicts)
    return f"peak {allocated}, {reserved}; {verdict}"


def _format_verdict(need: PatchedNeed) -> str:
    if need.fits is None:
        return "no verdict"
    if need.fits:
        return "fits, but pages" if need.pages else "fits"
    if need.oom_stage is not None:
        return f"runs out of memory in {describe_stage(need.oom_stage, need.oom_step or 0)}"
    return "does not fit" if need.oom_step is None else f"runs out of memory in step {need.oom_step:,}"
