"""A sweep on a terminal: the verdict first, and one screen of at most 40 lines of 100 columns."""

import dataclasses

import pytest

from memprof.report.terminal.console import to_text
from memprof.report.terminal.sweep import render
from tests.unit.report.sweeps import change_answer, make_sweep

SMALL = {"context_length": "256,512,1024", "batch_size": "1,2"}
LARGE = {
    "context_length": list(range(64, 1024, 64)), "batch_size": "1,2", "optimizer": "adamw,sgd,adam,adafactor,none",
    "dtype": "float32,bfloat16,float16",
}  # fmt: skip


def test_a_small_sweep_shows_its_cells():
    lines = to_text(render(make_sweep(**SMALL)), width=100).splitlines()
    assert lines[0] == "memprof sweep: 12 cells: 2 GPUs x 3 context lengths x 2 batch sizes"
    assert lines[2] == "11 of 12 cells fit." and lines[3].startswith("12 run on the virtual GPU, in 1.5 s")
    row = next(line for line in lines if line.split()[:3] == ["2", "512", "2"])
    assert row.split()[3:] == ["2.00", "fits", "*", "0.00", "250.0", "ms", "run"]
    assert "--exact" not in lines[-1]


@pytest.mark.parametrize("options", [SMALL, {**SMALL, "optimizer": "adamw,sgd,adam"}, LARGE])
def test_the_first_screen_has_40_lines_at_most(options):
    document = make_sweep(**options)
    for index in range(0, len(document.rows), 3):
        document = (
            change_answer(document, index, how="failed", fits=None, reason=f"error {index}") if index < 30 else document
        )
    lines = to_text(render(document), width=100).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert any(line.endswith("failed.") and " cells fit, " in line for line in lines[:4])


def test_full_has_every_cell_and_its_reason():
    document = make_sweep(**LARGE)
    text = to_text(render(document, full=True), width=200)
    assert text.count("fits well") == document.num_fitting and len(document.rows) == 900


def test_a_failed_cell_of_a_sweep_without_axes_has_its_reason_alone():
    document = change_answer(make_sweep(gpu_vram_bytes="2"), 0, how="failed", fits=None, reason="it broke")
    assert "  it broke" in to_text(render(document), width=100).splitlines()


def test_signs_say_what_was_not_run():
    document = make_sweep(**SMALL)
    for index, bound in enumerate(("about", "at most", "at least")):
        document = change_answer(document, index, how="monotony", bound=bound)
    text = to_text(render(document), width=100)
    assert "~1.25" in text and "<= 1.50" in text and ">= 1.50" in text and "--exact" in text


@pytest.mark.parametrize(
    ("ended", "note", "said"), [("interrupted", "", "interrupted"), ("stopped", "it broke", "stopped: it broke")]
)
def test_an_end_before_its_time_is_said(ended, note, said):
    document = change_answer(make_sweep(**SMALL), 0, how="left", fits=None)
    document = dataclasses.replace(document, ended=ended, note=note)
    text = to_text(render(document, quiet=True), width=100)
    assert "10 of 12 cells fit, 1 are left." in text
    assert f"The sweep was {said}; the same command goes on" in text
