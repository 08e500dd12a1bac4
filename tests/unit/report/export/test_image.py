"""The picture of a run: its areas are the report's figures, and the file is what its suffix says."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.export.image import _label_category, draw_run, write_image
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def run(usable_bytes: int) -> Report:
    """Two steps that leave 42 MiB allocated in all, on a GPU with `usable_bytes`."""
    made = TraceBuilder(None)
    made.trace.facts = Facts(device=DeviceFacts("Some GPU", usable_bytes, usable_bytes=usable_bytes))
    made.phase(PhaseKind.FORWARD, step=1)
    for _ in range(3):
        made.alloc(10 * MIB, "aten.mm", line="net.py:3 <lambda>")
    made.phase(PhaseKind.FORWARD, step=2)
    made.alloc(12 * MIB, "aten.mul")
    return analyze(made.trace)


def test_the_areas_add_up_to_what_is_allocated():
    document = run(100 * MIB)
    (axes,) = draw_run(document).axes
    highest = max(area.get_paths()[0].vertices[:, 1].max() for area in axes.collections)
    assert highest * MIB == document.peak.allocated_bytes == 42 * MIB


def test_the_legend_has_bytes_and_share_of_the_peak():
    document = run(100 * MIB)
    (axes,) = draw_run(document).axes
    texts = {text.get_text() for text in axes.get_legend().get_texts()}
    ((category, num_bytes),) = document.peak.categories.items()
    assert num_bytes == 42 * MIB and texts == {f"{category}: 42.00 MiB (100%)"}


@pytest.mark.parametrize(("times_peak", "drawn"), [(3 - 1 / 42, True), (3, False), (4, False)])
def test_the_gpu_is_drawn_where_the_run_is_not_a_line_beside_it(times_peak, drawn):
    (axes,) = draw_run(run(round(42 * MIB * times_peak))).axes
    assert any("Some GPU" in text.get_text() for text in axes.texts) is drawn


@pytest.mark.parametrize("usable", [100, 32])
def test_a_run_out_of_memory_says_so(usable):
    (axes,) = draw_run(run(usable * MIB)).axes
    assert any("out of memory" in text.get_text() for text in axes.texts) is (usable < 42)


@pytest.mark.parametrize(("name", "begin"), [("run.png", b"\x89PNG"), ("run.svg", b"<?xml"), ("RUN.PNG", b"\x89PNG")])
def test_the_suffix_is_the_format_and_the_same_run_the_same_bytes(tmp_path, name, begin):
    path = tmp_path / name
    write_image(run(100 * MIB), path)
    first = path.read_bytes()
    write_image(run(100 * MIB), path)  # memprof replaces its own
    assert first.startswith(begin) and path.read_bytes() == first


def test_another_picture_is_not_replaced(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(b"\x89PNG mine")
    with pytest.raises(UsageError, match="picture"):
        write_image(run(100 * MIB), path)
    assert path.read_bytes() == b"\x89PNG mine"


def test_without_memory_over_time_there_is_nothing_to_draw():
    with pytest.raises(UsageError, match="no memory over time"):
        draw_run(dataclasses.replace(run(100 * MIB), over_time=None))


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(4, "inputs"), (5, "inputs: 5 bytes (0%)"), (6, "inputs: 6 bytes (1%)")]
)
def test_a_category_of_less_than_half_a_percent_has_no_figure(num_bytes: int, text: str) -> None:
    assert _label_category("inputs", num_bytes, 1000) == text
