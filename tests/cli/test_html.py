"""`--html FILE`: the page in a real browser, and its figures beside those of the JSON."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.browser import Browser
from tests.lanes import by_day
from tests.processes import python

HOSTILE = "</script><img src=x onerror=alert(1)>"
SCRIPT = f"""
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))
        self.add_module({HOSTILE!r}, nn.Linear(300, 1001))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return getattr(self, {HOSTILE!r})(x)

model = Model().to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(6):
    loss = model(torch.randn(700, 300, device="cuda")).square().mean()
    kept.append(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FILE_NAME = "train <b>&amp;.py"


class Made(NamedTuple):
    page: Path
    report: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("page")
    (folder / FILE_NAME).write_text(SCRIPT, encoding="utf-8")
    asked = ("--gpu-vram", "0.5", "--json", "--html", "page.html", "--save", "run.memprof")
    done = python("-m", "memprof", "run", *asked, FILE_NAME, folder=folder)
    assert done.exit_code == 0, done.stderr
    assert "Page: page.html" in done.stderr
    return Made(folder / "page.html", json.loads(done.stdout), folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    one = Browser()
    yield one
    one.close()


@pytest.fixture
def page(browser, made) -> Iterator[Browser]:
    browser.open(made.page)
    yield browser
    assert browser.problems == []
    assert browser.asked == []


def categories(page: Browser) -> dict[str, int]:
    rows = page.run(
        "[...document.querySelectorAll('#categories tr')].map(({dataset}) => [dataset.category, dataset.bytes])"
    )
    return {name: int(num_bytes) for name, num_bytes in rows}


def shown(page: Browser) -> list[list[str]]:
    """Of each row: total, count, each, shape and dtype, category, what, operator, line."""
    cells = "[...row.cells].map(cell => cell.dataset.value || cell.textContent)"
    return page.run(f"[...document.querySelectorAll('#tensors tbody tr')].map(row => {cells})")


def write(page: Browser, field: str, text: object) -> None:
    kinds = ["input", "change"]
    told = f"for (const kind of {kinds}) field.dispatchEvent(new Event(kind));"
    page.run(f"(field => {{ field.value = {json.dumps(text)}; {told} }})(document.getElementById({json.dumps(field)}))")


def test_the_peak_is_that_of_the_json(page, made):
    peak = made.report["peak"]
    assert page.run("Number(document.getElementById('moment').dataset.bytes)") == peak["allocated_bytes"]
    assert categories(page) == {name: size for name, size in peak["categories"].items() if size}
    told = [
        (
            one["total_bytes"], one["count"], one["bytes"], "x".join(map(str, one["shape"])) + f" {one['dtype']}",
            one["category"], one["source"] or "",
        )
        for one in peak["tensors"]
        if one["bytes"]
    ]  # fmt: skip
    found = [(int(row[0]), int(row[1]), int(row[2]), row[3].strip(), row[4], row[7]) for row in shown(page)]
    assert sorted(found) == sorted((*one[:3], one[3].strip(), *one[4:]) for one in told)


@pytest.mark.nightly
def test_foreign_words_are_text(page):
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelectorAll('main b').length") == 0
    assert any(HOSTILE in row[5] for row in shown(page))
    assert FILE_NAME in page.run("document.getElementById('heading').textContent")
    labels = page.run("[...document.querySelectorAll('#holders text')].map(one => one.textContent).join(' ')")
    assert "</script>" in labels


@pytest.mark.nightly
def test_a_click_shows_that_moment(page, made):
    box = page.run("document.querySelector('#timeline .nsewdrag').getBoundingClientRect().toJSON()")
    x, y = box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.6
    before = page.run("document.getElementById('moment').textContent")
    page.move(x, y)
    page.wait("!document.getElementById('tip').hidden")
    page.click(x, y)
    page.wait(f"document.getElementById('moment').textContent !== {json.dumps(before)}")
    assert sum(categories(page).values()) == page.run("Number(document.getElementById('moment').dataset.bytes)")
    event = page.run("Number(document.getElementById('event').value)")
    assert 0.65 < event / page.run("Number(document.getElementById('event').max)") < 0.75


@pytest.mark.nightly
def test_every_stage_ends_with_what_the_report_says(page, made):
    from memprof.flows.saved_files import load

    ledger = load(made.folder / "run.memprof").ledger
    stages = [stage for stage in made.report["stages"] if stage["name"] != "context"]
    assert len(stages) == len(ledger.spans) > 8
    for span, stage in list(zip(ledger.spans, stages, strict=True))[::4]:
        write(page, "event", span.end - 1)
        assert page.run("Number(document.getElementById('moment').dataset.bytes)") == stage["allocated_bytes"]
        assert sum(categories(page).values()) == stage["allocated_bytes"]


@pytest.mark.nightly
def test_the_table_filters_and_sorts(page):
    everything = shown(page)
    write(page, "filter", "linear relu")
    write(page, "filter", "OPTIMIZER exp_avg_sq")
    found = shown(page)
    assert found == [row for row in everything if row[4] == "optimizer state" and "exp_avg_sq" in row[5]] != []
    assert page.run("Number(document.getElementById('shown').dataset.bytes)") == sum(int(row[0]) for row in found)
    write(page, "filter", "")
    page.run("document.querySelector('th[data-key=each] button').click()")
    assert [int(row[2]) for row in shown(page)] == sorted((int(row[2]) for row in everything), reverse=True)
    page.run("document.querySelector('th[data-key=each] button').click()")
    assert [int(row[2]) for row in shown(page)] == sorted(int(row[2]) for row in everything)


@pytest.mark.nightly
def test_a_findings_evidence_shows_its_tensors(page, made):
    titles = [finding["title"] for finding in made.report["findings"]]
    assert titles and page.run("[...document.querySelectorAll('#found a')].map(one => one.textContent)") == titles
    said = page.run("[...document.querySelectorAll('#found li')].map(one => one.textContent)")
    for text, finding in zip(said, made.report["findings"], strict=True):
        assert all(name in text.removeprefix(finding["title"]) for name in finding["fixes"])
    suggested = page.run("document.getElementById('next').textContent")
    assert suggested.startswith("Next, read what each finding means: memprof ")
    targets = "[...document.querySelectorAll('#found a')].map(one => document.querySelector(one.hash).textContent)"
    assert all(title in text for title, text in zip(titles, page.run(targets), strict=True))
    links = page.run("document.querySelectorAll('#findings a').length")
    assert links
    everything = len(shown(page))
    page.run("document.querySelector('#findings a').click()")
    assert 0 < len(shown(page)) < everything
    page.run("document.querySelector('#chosen button').click()")
    assert len(shown(page)) == everything


@pytest.mark.nightly
def test_the_curve_keeps_its_peak_and_has_other_modes(page, made):
    curve = "document.getElementById('timeline').data.at(-1).y"
    unit = 2**20
    assert max(page.run(curve)) * unit == made.report["peak"]["allocated_bytes"]
    for mode, name in (("reserved", "reserved_bytes"), ("used", "device_used_bytes")):
        page.run(f"document.querySelector('[data-name={mode}]').click()")
        assert max(page.run(curve)) * unit == made.report["peak"][name]


@pytest.mark.nightly
def test_the_map_shows_what_is_free_at_the_peak(page, made):
    from memprof.flows.saved_files import load

    ledger = load(made.folder / "run.memprof").ledger
    reserved = ledger.run.timeline.reserved[ledger.peak_event]
    said = page.run("({...document.getElementById('segments-said').dataset})")
    assert said == {"reserved": str(reserved), "free": str(reserved - ledger.peak_bytes)}
    trace = "document.getElementById('segments').data[0]"
    drawn, colours = page.run(f"[{trace}.x, {trace}.marker.color]")
    hole = page.run("getComputedStyle(document.documentElement).getPropertyValue('--hole')")
    free = sum(length for length, colour in zip(drawn, colours, strict=True) if colour == hole)
    assert free / sum(drawn) == pytest.approx((reserved - ledger.peak_bytes) / reserved, abs=0.02)


@pytest.mark.nightly
def test_two_gpus_are_two_rows(browser, memprof, script):
    made = script("""
        import torch
        torch.zeros(3 << 20, device="cuda:0")
        kept = torch.zeros(5 << 20, device="cuda:1")
    """)
    report = memprof("run", "--gpus", 2, "--gpu-vram", 4, "--json", "--html", "two.html", made).json
    browser.open(Path("two.html"))
    rows = browser.run("[...document.querySelectorAll('#several tbody tr')].map(row => [...row.cells].map("
                       "cell => cell.dataset.value || cell.textContent))")  # fmt: skip
    assert [(row[0], int(row[1]), int(row[3])) for row in rows] == [
        (gpu["device"], gpu["peak_allocated_bytes"], gpu["device_used_bytes"]) for gpu in report["gpus"]
    ]
    assert [row[7] for row in rows] == ["", "decides the verdict, shown here"]
    assert browser.problems == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "width"), by_day([*itertools.product(["light", "dark"], [400, 1280])], ("light", 400))
)
def test_no_page_is_wider_than_its_window(browser, made, width, scheme):
    browser.open(made.page, width=width, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.documentElement.dataset.theme") == scheme
    assert browser.problems == []


def test_what_is_there_is_not_lost(made, memprof):
    other = made.folder / "other.html"
    other.write_text("<p>mine</p>", encoding="utf-8")
    capture = made.folder / "run.memprof"
    refused = memprof("show", capture, "--html", other)
    assert (refused.exit_code, refused.stdout, other.read_text()) == (2, "", "<p>mine</p>")
    assert "is no page of memprof" in refused.stderr and "--html" in refused.stderr
    done = memprof("show", capture, "--html", other, "--force", "-q")
    assert (done.exit_code, done.stderr) == (0, "")
    assert other.read_bytes().endswith(b"</html>\n")
    again = memprof("show", capture, "--html", other)  # a page of its own is replaced
    assert again.exit_code == 0


def test_json_has_no_moments(made, memprof, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.report), encoding="utf-8")
    done = memprof("show", tmp_path / "run.json", "--html", tmp_path / "page.html")
    assert done.exit_code == 2 and "--save" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_plotly_is_asked_for_before_the_run(made, memprof, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = memprof("show", made.folder / "run.memprof", "--html", made.folder / "none.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pip install 'plotly>=6'" in done.stderr


def test_a_picture_of_a_capture_and_of_a_report_in_json(made, memprof, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.report), encoding="utf-8")
    for file, picture in ((made.folder / "run.memprof", "a.svg"), (tmp_path / "run.json", "b.svg")):
        done = memprof("show", file, "--image", tmp_path / picture)
        assert (done.exit_code, done.stderr) == (0, f"Picture: {tmp_path / picture}\n")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("name", ["run.jpg", "run", "png"])
def test_a_picture_of_another_kind_is_refused_before_the_run(memprof, tmp_path, name):
    done = memprof("profile", "--model", "gpt2", "--image", tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "") and ".png or .svg" in done.stderr
