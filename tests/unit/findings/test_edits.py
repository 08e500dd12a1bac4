"""The edit of the line that keeps tensors, by what it keeps."""

from __future__ import annotations

import pytest

from memprof.findings.edits import Edit, EditKind, make_holder_edit
from memprof.trace.events import CycleKind, Holder
from tests.unit.traces import TraceBuilder

SOURCE = "/x/train.py:9 main"
LOSSES = Holder(0, "list", "losses", SOURCE, True, None, (), 0, 0, None)


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({}, EditKind.KEEP_ON_HOST, Edit(EditKind.KEEP_ON_HOST, SOURCE, "losses")),
        ({"storages": (0,)}, None, Edit(EditKind.KEEP_NUMBER, SOURCE, "losses")),
        ({"storages": (0, 1)}, None, Edit(EditKind.KEEP_DETACHED, SOURCE, "losses")),
        ({"fills": False}, EditKind.KEEP_ON_HOST, None),
        ({"source": None}, EditKind.KEEP_ON_HOST, None),
        ({"kind": CycleKind.GRAD, "name": "loss"}, None, Edit(EditKind.TAKE_GRADIENT, SOURCE, "loss")),
        (
            {"kind": CycleKind.CTX, "name": "ctx.saved -> Out", "fills": False},
            EditKind.KEEP_ON_HOST,
            Edit(EditKind.SAVE_FOR_BACKWARD, SOURCE, "saved"),
        ),
        ({"kind": CycleKind.OBJECTS}, EditKind.KEEP_ON_HOST, None),
        ({"kind": CycleKind.FUNCTION}, None, None),
    ],
)
def test_the_edit_of_a_holder(change: dict[str, object], kind: EditKind | None, expected: Edit | None) -> None:
    """Storage 0 has no dimensions, and 1 has one."""
    b = TraceBuilder()
    b.new()
    b.new(4)
    assert make_holder_edit(b.trace, LOSSES._replace(**change), kind) == expected
    assert make_holder_edit(b.trace, None, kind) is None


def test_the_text_of_an_edit_has_its_name() -> None:
    assert Edit(EditKind.DELETE, SOURCE, "out").text == "`del out` after its last use"
