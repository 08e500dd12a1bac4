"""The page of a sweep: a heat map per pair of axes, with the frontier between what fits and what does not."""

from memprof.report.page.library import make_figure
from memprof.report.page.page import build_sections_data, render_page
from memprof.report.page.sweep import build_sweep_sections
from tests.unit.report.sweeps import change_answer, make_sweep

GRID = {"context_length": "256,512,1024,2048", "batch_size": "1,2,4"}


def _lines(section):
    return sorted((one["x0"], one["y0"], one["x1"], one["y1"]) for one in section.layout["shapes"])


def test_each_gpu_has_a_heat_map_with_its_frontier():
    sections = build_sweep_sections(make_sweep(**GRID))
    for section in sections[:-1]:
        make_figure(section.traces, section.layout)  # plotly refuses names and values that it does not know
    two, four, by_context, by_batch, cells = sections
    assert [two.title, four.title, cells.title] == ["2 GiB", "4 GiB", "Cells"]
    (heat_map,) = two.traces
    assert (heat_map["x"], heat_map["y"]) == (["1", "2", "4"], ["256", "512", "1,024", "2,048"])
    assert heat_map["text"][0] == ["1.25", "1.50", "2.00"]
    assert [[value < 1 for value in line] for line in heat_map["z"]] == [
        [True, True, True], [True, True, False], [True, False, False], [False, False, False],
    ]  # fmt: skip
    # Below 256 x 4; beside and below 512 x 2; beside and below 1024 x 1.
    assert _lines(two) == [(-0.5, 2.5, 0.5, 2.5), (0.5, 1.5, 0.5, 2.5), (0.5, 1.5, 1.5, 1.5),
                           (1.5, 0.5, 1.5, 1.5), (1.5, 0.5, 2.5, 0.5)]  # fmt: skip
    assert (
        "fits: needs 2.00 GiB, headroom 0.00 GiB, step at least 250.0 ms<br>run: fits well"
        in heat_map["hovertext"][0][2]
    )
    assert "&lt;script&gt;OOM" in heat_map["hovertext"][3][2]
    assert by_context.title == "Cells that fit, by capacity, GiB and context length"
    assert by_batch.traces[0]["text"] == [["3 of 4", "2 of 4", "1 of 4"], ["4 of 4", "3 of 4", "2 of 4"]]
    assert len(cells.rows) == 24 and cells.rows[0][-1].startswith("memprof profile")


def test_a_map_is_named_by_what_its_cells_share():
    sections = build_sweep_sections(make_sweep(**GRID, gradient_accumulation="1,2"))
    titles = [section.title for section in sections[:4]]
    assert titles == [f"{capacity} GiB, gradient accumulation {number}" for capacity in (2, 4) for number in (1, 2)]


def test_a_cell_without_a_verdict_has_no_colour():
    document = change_answer(make_sweep(**GRID), 0, how="failed", fits=None, needed_bytes=None, reason="no such thing")
    (heat_map,) = build_sweep_sections(document)[0].traces
    assert heat_map["z"][0][0] is None and "failed: no such thing" in heat_map["hovertext"][0][0]


def test_one_axis_is_enough():
    sections = build_sweep_sections(make_sweep(gpu_vram_bytes="2", batch_size="1,2,4096"))
    assert [section.title for section in sections] == ["Cells", "Cells"]


def test_the_page_has_all_of_it():
    document = make_sweep(**GRID)
    data = build_sections_data(document)
    assert data["good"] and data["verdict"].startswith("15 of 24 cells fit.") and "Assumptions" in data["text"]
    page = render_page(document)
    assert "<script>OOM" not in page and len(page) > 1_000_000
