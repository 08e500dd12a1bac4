"""`--html FILE` of compare, analyze, recommend and sweep: pages in a real browser, their figures beside the JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.browser import Browser
from tests.lanes import by_day
from tests.processes import python

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(6):
    loss = model(torch.randn(BATCH, 256, device="cuda")).square().mean()
    kept.append(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = ("--model-size", "1M", "--gpu-vram", "2", "--context-length", "64")
INFERENCE = ("--mode", "inference", "--batch-size", "1")


class Made(NamedTuple):
    page: Path
    answer: dict[str, Any]


def ask(folder: Path, *words: str) -> Made:
    done = python("-m", "memprof", *words, "--json", "--html", f"{words[0]}.html", folder=folder)
    assert done.exit_code in (0, 3, 4) and f"Page: {words[0]}.html" in done.stderr, done.stderr
    return Made(folder / f"{words[0]}.html", json.loads(done.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    for name, batch in (("a", 64), ("b <i>&", 4096)):
        (place / f"{name}.py").write_text(SCRIPT.replace("BATCH", str(batch)), encoding="utf-8")
        words = ("run", "-q", "--gpu-vram", "2", "--steps", "6", "--save", f"{name}.memprof", f"{name}.py")
        assert python("-m", "memprof", *words, folder=place).exit_code == 0
    return place


@pytest.fixture(scope="module")
def compared(folder) -> Made:
    return ask(folder, "compare", "a.memprof", "b <i>&.memprof")


@pytest.fixture(scope="module")
def analyzed(folder) -> Made:
    return ask(folder, "analyze", "a.memprof")


@pytest.fixture(scope="module")
def recommended(folder) -> Made:
    return ask(folder, "recommend", *MODEL, *INFERENCE)


@pytest.fixture(scope="module")
def swept(folder) -> Made:
    """The estimate answers this, so that nothing is run; the second batch fits one of the GPUs, the third none."""
    axes = ("--context-length", "1024,4096", "--batch-size", "1,4,4096", "--gpu", "rtx-4090,h200")
    return ask(folder, "sweep", "--model", "pythia-410m,qwen3-0.6b", *axes)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    one = Browser()
    yield one
    one.close()


@pytest.fixture
def browser(chromium) -> Iterator[Browser]:
    yield chromium
    assert chromium.problems == [] and chromium.asked == []


def section(browser: Browser, title: str) -> str:
    """JavaScript for the section of this title."""
    titles = browser.run("[...document.querySelectorAll('h2')].map(one => one.textContent)")
    return f"document.querySelectorAll('h2')[{titles.index(title)}].parentElement"


def rows(browser: Browser, title: str) -> list[list[str]]:
    cells = "[...row.cells].map(cell => cell.dataset.value ?? cell.textContent)"
    return browser.run(f"[...{section(browser, title)}.querySelectorAll('tbody tr')].map(row => {cells})")


@pytest.mark.nightly
def test_two_runs_in_one_page(browser, compared):
    browser.open(compared.page)
    answer = compared.answer
    found = rows(browser, "Totals")
    assert [(row[0], int(row[1]), int(row[2]), int(row[3])) for row in found] == [
        (row["name"], row["a_bytes"], row["b_bytes"], row["difference_bytes"])
        for row in answer["totals"]
        if row["a_bytes"] is not None
    ]
    tensors = rows(browser, "Tensors at the peak that differ")
    assert [int(row[0]) for row in tensors] == [row["difference_bytes"] for row in answer["tensors"]]
    drawn = f"{section(browser, 'Memory over both runs')}.querySelector('.figure').data"
    peaks = [
        max(
            map(sum, zip(*browser.run(f"{drawn}.filter(one => one.xaxis === '{axis}').map(one => one.y)"), strict=True))
        )
        for axis in ("x", "x2")
    ]
    allocated = next(row for row in answer["totals"] if row["name"] == "allocated")
    assert peaks == pytest.approx([allocated["a_bytes"] / 2**20, allocated["b_bytes"] / 2**20], rel=0.02)
    assert browser.run("document.querySelectorAll('main i').length") == 0
    assert "b <i>&.memprof" in browser.run("document.getElementById('heading').textContent")


@pytest.mark.nightly
def test_a_table_filters_and_sorts(browser, analyzed):
    browser.open(analyzed.page)
    groups = analyzed.answer["devices"][0]["moment"]["groups"]
    title = "What is live at the peak"
    everything = rows(browser, title)
    assert [(int(row[0]), int(row[2]), row[3]) for row in everything] == [
        (one["allocated_bytes"], one["count"], one["category"]) for one in groups
    ]
    holder = section(browser, title)
    browser.run(f"(field => {{ field.value = 'OPTIMIZER state'; field.dispatchEvent(new Event('input')); }})"
                f"({holder}.querySelector('input'))")  # fmt: skip
    found = rows(browser, title)
    assert found == [row for row in everything if row[3] == "optimizer state"] != []
    browser.run(
        f"(field => {{ field.value = ''; field.dispatchEvent(new Event('input')); }})({holder}.querySelector('input'))"
    )
    browser.run(f"{holder}.querySelectorAll('th button')[2].click()")
    assert [int(row[2]) for row in rows(browser, title)] == sorted((one["count"] for one in groups), reverse=True)
    curve = f"{section(browser, 'Memory over the recording')}.querySelector('.figure').data[1].y"
    assert max(browser.run(curve)) * 2**20 == analyzed.answer["devices"][0]["peak"]["allocated_bytes"]


@pytest.mark.nightly
def test_what_was_run_and_what_it_costs(browser, recommended):
    browser.open(recommended.page)
    answer = recommended.answer
    found = rows(browser, "What was run")
    assert len(found) == len(answer["choices"])
    assert found[0][0] == answer["chosen"]["name"] and int(found[0][2]) == answer["chosen"]["needed_bytes"]
    assert sorted(row[-1] for row in found) == sorted(one["command"] for one in answer["choices"])
    assert answer["chosen"]["command"] in browser.run(f"{section(browser, 'What to use')}.textContent")
    bars = f"{section(browser, 'What was run')}.querySelector('.figure').data[0].x"
    assert len(browser.run(bars)) == min(len(found), 24)


def list_boxes(browser: Browser, figure: str, selector: str) -> list[tuple[str, float, float, float, float]]:
    """Text, left, top, right and bottom of each element of a figure."""
    box = "(box => [one.textContent, box.left, box.top, box.right, box.bottom])(one.getBoundingClientRect())"
    return browser.run(f"[...{figure}.querySelectorAll({json.dumps(selector)})].map(one => {box})")


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "width"), [*itertools.product(["light", "dark"], [520, 1280])])
def test_a_sweep_is_a_map_with_its_frontier_and_reasons(browser, swept, scheme, width):
    browser.open(swept.page, width=width, scheme=scheme)
    title = "qwen3-0.6b, h200"
    rows = [row["answer"] for row in swept.answer["rows"] if row["values"][:2] == ["qwen3-0.6b", "h200"]]
    figure = f"{section(browser, title)}.querySelector('.figure')"
    browser.run(f"{figure}.scrollIntoView()")
    assert browser.run(f"{figure}.data[0].z.flat().map(one => one > 1)") == [not row["fits"] for row in rows]
    assert True in [row["fits"] for row in rows] and False in [row["fits"] for row in rows]
    # A cell has its colour, its need and, under the mouse, its reason.
    assert len(list_boxes(browser, figure, ".heatmaplayer .hm image, .heatmaplayer image")) == 1
    cells = list_boxes(browser, figure, ".heatmap-label text")
    assert len(cells) == len(rows)
    assert [float(text.lstrip("~<=> ").replace(",", "")) for text, *_ in cells] == [
        pytest.approx(row["needed_bytes"] / 2**30, abs=0.006) for row in rows
    ]
    _, left, top, right, bottom = cells[0]
    browser.move((left + right) / 2, (top + bottom) / 2)
    browser.wait(f"{figure}.querySelector('.hoverlayer .hovertext') !== null")
    hover = browser.run(f"{figure}.querySelector('.hoverlayer').textContent")
    assert "context length 1,024, batch size 1" in hover and "fits" in hover and rows[0]["reason"][:40] in hover
    # The frontier runs between what fits and what does not, and is seen on both.
    lines = list_boxes(browser, figure, ".shapelayer path")
    assert (
        lines
        and browser.run(f"getComputedStyle({figure}.querySelector('.shapelayer path')).stroke") == "rgb(20, 24, 28)"
    )
    # Nothing is cut off, and no word lies on another.
    ((_, *frame),) = list_boxes(browser, figure, ".main-svg")[:1]
    texts = list_boxes(browser, figure, ".ytick text, .xtick text, .ytitle, .xtitle, .heatmap-label text")
    assert {"batch size", "context length", "1,024", "4,096"} <= {text for text, *_ in texts}
    for text, left, top, right, bottom in texts:
        assert frame[0] <= left < right <= frame[2] and frame[1] <= top < bottom <= frame[3], text
    for number in range(browser.run("document.querySelectorAll('.figure').length")):
        drawn = f"document.querySelectorAll('.figure')[{number}]"
        titles, ticks = list_boxes(browser, drawn, ".ytitle"), list_boxes(browser, drawn, ".ytick text")
        assert max(title[3] for title in titles) <= min(tick[1] for tick in ticks), ticks
    for (one, *a), (other, *b) in itertools.combinations(texts, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "width"), by_day([*itertools.product(["light", "dark"], [400, 1280])], ("light", 400))
)
def test_no_page_is_wider_than_its_window(browser, compared, analyzed, recommended, swept, width, scheme):
    for made in (compared, analyzed, recommended, swept):
        browser.open(made.page, width=width, scheme=scheme)
        assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.run("document.documentElement.dataset.theme") == scheme


@pytest.mark.nightly
def test_a_comparison_of_json_has_no_curves(folder, memprof, browser):
    answer = folder / "compared.json"
    answer.write_text(memprof("compare", folder / "a.memprof", folder / "b <i>&.memprof", "--json").stdout)
    done = memprof("show", answer, "--html", folder / "shown.html", "--force")
    assert done.exit_code == 0, done.stderr
    browser.open(folder / "shown.html")
    assert "Memory over both runs" not in browser.run("document.body.textContent")
    assert rows(browser, "Totals")


def test_another_file_is_not_replaced(folder, memprof, browser):
    other = folder / "mine.html"
    other.write_text("<p>mine</p>", encoding="utf-8")
    for words in (("compare", folder / "a.memprof", folder / "a.memprof"), ("analyze", folder / "a.memprof")):
        refused = memprof(*words, "--html", other)
        assert (refused.exit_code, refused.stdout) == (2, "") and other.read_text() == "<p>mine</p>"
