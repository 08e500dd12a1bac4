"""Edits of a program: the change of one place in its source that a finding's fix is, where the fix is that local.

`flows/patch/` makes the change in the text of the file, if the place is one that it can change safely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from memprof.trace.events import HOOK_KIND, CycleKind, Holder, Trace


class EditKind(StrEnum):
    """What an edit changes; the value says it, with the edit's name for `{}`."""

    DELETE = "`del {}` after its last use"
    KEEP_NUMBER = "keep a number in `{}`, or a tensor without its graph"
    KEEP_DETACHED = "keep tensors without their graph in `{}`"
    KEEP_ON_HOST = "keep less on the GPU in `{}`"
    KEEP_OUTPUTS_ON_HOST = "keep outputs in host memory in `{}`"
    LOAD_ON_HOST = 'torch.load(..., map_location="cpu")'
    KEEP_ERROR_TEXT = "keep the text of the error in `{}`"
    RETRY_AFTER_HANDLER = "retry after the `except` block"
    FREE_GRADIENTS = "zero_grad(set_to_none=True) right after the optimizer's step"
    NO_GRADIENTS = "call it under torch.no_grad()"
    TAKE_GRADIENT = (
        "torch.autograd.grad(..., create_graph=True) instead of backward(), which also gives parameters a .grad"
    )
    SAVE_FOR_BACKWARD = "ctx.save_for_backward(...) instead of ctx.{}"


@dataclass(frozen=True, slots=True)
class Edit:
    """The change of a program that takes away the cause of a finding."""

    kind: EditKind
    source: str  # `file:line function` of the line to change, or that shows the place to change
    name: str = ""  # the variable or attribute, as in `Holder.name`; several: "h, c"
    container: str = (
        ""  # what the values to change are: tuple, list or dict of tensors; "": tensors, as far as is known
    )

    @property
    def text(self) -> str:
        """Return what is changed, for display."""
        return self.kind.value.format(self.name)


_CYCLE_EDITS = {CycleKind.GRAD: EditKind.TAKE_GRADIENT, CycleKind.CTX: EditKind.SAVE_FOR_BACKWARD}


def make_holder_edit(trace: Trace, holder: Holder | None, kind: EditKind | None) -> Edit | None:
    """Return the edit of the line that fills `holder`, or that closes it, a cycle; None: the line is not known.

    `kind` is that of what is kept; None: numbers if `holder` has tensors without dimensions alone, else tensors without
    their graph.
    """
    if holder is None or holder.source is None:
        return None
    if holder.is_cycle:
        cycle_kind, attribute = CycleKind(holder.kind), holder.name.removeprefix("ctx.").partition(" ")[0]
        return Edit(_CYCLE_EDITS[cycle_kind], holder.source, attribute) if cycle_kind in _CYCLE_EDITS else None
    if not holder.fills or holder.kind == HOOK_KIND:
        return None
    if kind is None:
        is_number = all(not trace.storages[index].shape for index in holder.storages)
        kind = EditKind.KEEP_NUMBER if is_number else EditKind.KEEP_DETACHED
    return Edit(kind, holder.source, holder.name)


def make_carried_edit(holders: Sequence[Holder]) -> Edit | None:
    """Return the edit that detaches the variables of `holders`, which one line computes from their earlier values."""
    if holders[0].source is None or not holders[0].fills:
        return None
    return Edit(EditKind.KEEP_DETACHED, holders[0].source, ", ".join(holder.name for holder in holders))
