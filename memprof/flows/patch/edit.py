"""An edit made in the text of a file: one function for each kind of edit, or for several that are alike."""

from __future__ import annotations

from memprof.findings.edits import Edit, EditKind
from memprof.flows.patch.cycles import save_for_backward, take_gradient
from memprof.flows.patch.deletion import delete_after_last_use
from memprof.flows.patch.enclosing import call_without_gradients, retry_after_handler
from memprof.flows.patch.kept_values import keep_less
from memprof.flows.patch.source import Change, Source, parse_source
from memprof.flows.patch.statements import free_gradients, keep_error_text, load_on_host


def edit_source(text: str, edit: Edit, *, is_script: bool = True) -> str:
    """Return the text of a file after `edit`. `is_script`: whether no other file imports it, and reads its variables.

    Raises NoPatchError: the edit cannot be made safely.
    """
    source = Source(text, is_script=is_script)
    return source.change(_list_changes(source, edit))


def _list_changes(source: Source, edit: Edit) -> list[Change]:
    _, line = parse_source(edit.source)
    match edit.kind:
        case EditKind.DELETE:
            return delete_after_last_use(source, line, edit.name)
        case EditKind.LOAD_ON_HOST:
            return load_on_host(source, line)
        case EditKind.KEEP_ERROR_TEXT:
            return keep_error_text(source, line, edit.name)
        case EditKind.RETRY_AFTER_HANDLER:
            return retry_after_handler(source, line)
        case EditKind.FREE_GRADIENTS:
            return free_gradients(source)
        case EditKind.NO_GRADIENTS:
            return call_without_gradients(source, line)
        case EditKind.TAKE_GRADIENT:
            return take_gradient(source, line)
        case EditKind.SAVE_FOR_BACKWARD:
            return save_for_backward(source, line, edit.name)
        case _:
            return keep_less(source, line, edit.name, edit.kind, edit.container)
