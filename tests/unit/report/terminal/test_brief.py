"""How many stages the first screen of a report shows."""

from __future__ import annotations

import pytest
from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.terminal.brief import _Fitting
from memprof.report.terminal.console import to_text


@pytest.mark.parametrize(
    ("num_others", "num_stages"), [(0, 8), (32, 8), (33, 7), (34, 6), (35, 5), (36, 4), (37, 4), (60, 4)]
)
@pytest.mark.parametrize("width", [60, 200])
def test_they_are_as_many_as_forty_lines_leave_room_for(num_others: int, num_stages: int, width: int) -> None:
    def make_screen(num: int) -> RenderableType:
        return Group(*[Text("other")] * num_others, *[Text("stage")] * num)

    assert to_text(_Fitting(make_screen), width).count("stage") == num_stages


def test_lines_are_those_of_a_hundred_columns() -> None:
    line = Text("two lines of sixty columns, and one of a hundred: " + "stage" * 4)
    assert to_text(_Fitting(lambda num: Group(*[line] * (num + 32))), 60).count("sixty") == 40
