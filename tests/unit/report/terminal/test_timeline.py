import dataclasses

import pytest

from memprof.ledger.over_time import OverTime
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import to_text
from memprof.report.terminal.timeline import CategoryTimeline

MIB = 1 << 20
FOUND = OverTime(
    num_events=1000,
    events=tuple(range(40, 1000, 100)),
    allocated_bytes=tuple(size * MIB for size in (1, 2, 8, 4, 2, 2, 4, 10, 5, 2)),
    categories={
        "activations": tuple(size * MIB for size in (0, 1, 7, 3, 1, 0, 2, 8, 3, 0)),
        "parameters": tuple(size * MIB for size in (1, 1, 1, 1, 1, 2, 2, 2, 2, 2)),
    },
    most_bytes={"activations": 8 * MIB, "parameters": 2 * MIB},
    peak_event=740,
    failed_event=250,
    steps=((1, 110), (2, 610)),
)


def lines(found, width):
    return to_text(CategoryTimeline(found, Unit("MiB", MIB), "backward of step 2"), width).splitlines()


def test_one_line_a_category_and_the_peak_is_marked():
    shown = lines(FOUND, 31)  # ten columns
    bars = [line[15:25] for line in shown if line.startswith(("  activations", "  parameters"))]
    assert bars == [" ▁▇▃▁ ▂█▃ ", "▁▁▁▁▁▂▂▂▂▂"]
    marks = next(line for line in shown if "^" in line)
    assert marks[15 + 7] == "^" and marks[15 + 2] == "!"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_it_is_as_wide_as_the_console(width):
    shown = lines(FOUND, width)
    assert max(map(len, shown)) <= width
    line = next(line for line in shown if line.startswith("  parameters"))
    assert len(line) == width and line.endswith(" 2.00")
    place = next(line for line in shown if "^" in line and "peak" not in line).index("^")
    assert next(line for line in shown if line.startswith("  activations"))[place] == "█"


def test_there_is_none_where_there_is_no_room():
    assert lines(FOUND, 25) == [""]


def test_the_peak_may_be_the_request_that_is_refused():
    shown = lines(dataclasses.replace(FOUND, failed_event=740), 60)
    assert any(line.strip() == "‼" for line in shown)
    said = " ".join(" ".join(shown).split())
    assert "‼ the peak, in backward of step 2, and the request that the GPU refuses" in said
