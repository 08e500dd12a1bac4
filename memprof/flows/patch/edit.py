"""An edit made in the text of a file: one function for each kind of edit, or for several that are alike."""

from __future__ import annotations

from memprof.findings.edits import Edit, EditKind
from memprof.flows.patch.deletion import delete_after_last_use
from memprof.flows.patch.kept_values import keep_less
from memprof.flows.patch.source import Source, parse_source


def edit_source(text: str, edit: Edit) -> str:
    """Return the text of a file after `edit`. Raises NoPatchError: it cannot be made safely."""
    source, (_, line) = Source(text), parse_source(edit.source)
    if edit.kind is EditKind.DELETE:
        changes = delete_after_last_use(source, line, edit.name)
    else:
        changes = keep_less(source, line, edit.name, edit.kind)
    return source.change(changes)
