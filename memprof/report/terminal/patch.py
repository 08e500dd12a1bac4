"""The result of `--suggest-patch` as text for a terminal: the effect, the diff, and what did not help."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from memprof.report.documents.patch import PatchedNeed, SuggestedPatch
from memprof.report.terminal.console import dim, make_heading, make_section
from memprof.units import format_bytes

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def render_patch(patch: SuggestedPatch) -> Iterator[RenderableType]:
    """Yield the parts of the section: changes with their effect, the diff as it is, and changes that do not help."""
    if patch.after is None:
        yield make_section("\nNo patch", *map(Text, patch.tried or ("no finding has a change of one place",)))
        return
    lines = [*patch.changes, _format_effect(patch.before, patch.after)]
    yield make_section("\nSuggested patch (not applied)", *map(Text, lines))
    yield make_heading("")
    for line in patch.diff.splitlines():
        yield Text(line, style=_STYLES.get(line[:1], ""), no_wrap=True, overflow="ignore")
    if patch.tried:
        yield make_section(Text(""), *(dim(f"no patch: {reason}") for reason in patch.tried))


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
        return "fits"
    return "does not fit" if need.oom_step is None else f"runs out of memory in step {need.oom_step:,}"
