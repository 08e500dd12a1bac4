"""The cause of public bug reports is the first finding, with the line to change and what helped; some in `make test`.

What is not so yet stands in `KNOWN`, with what is said instead. A report that is told rightly from now on fails until
its line there is removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lanes import by_day
from tests.reports.reports import Report, list_mistakes, list_reports, read, run

REPORTS = list_reports()

KNOWN: dict[str, str] = {}


BY_DAY = (
    "deepdyn_235",
    "ffdnet_4",
    "fms_fsdp_152",
    "functorch_1058",
    "minimize_39",
    "pinot_23",
    "point_transformer_5",
    "pyg_459",
    "pyg_5101",
    "pytorch_2225",
    "semseg_60",
)


@pytest.mark.parametrize("name", by_day(REPORTS, *BY_DAY))
def test_cause(name, tmp_path, request):
    if name in KNOWN:
        request.applymarker(pytest.mark.xfail(reason=KNOWN[name], raises=AssertionError, strict=True))
    findings = run(REPORTS[name], tmp_path)["findings"]
    assert not list_mistakes(REPORTS[name], findings)


def test_what_is_known_is_there():
    assert KNOWN.keys() <= REPORTS.keys()


LEAK = Report(
    path=Path("leak.py"),
    source="owner/name#1",
    options=(),
    first=("memory-growth",),
    fixes=(".cpu()",),
    useless_fixes=("vocabulary-cap",),
    others=("fragmentation",),
    causes=("leak.py:7",),
)


def finding(name, title="", fixes=(), **evidence):
    return {"id": name, "title": title, "evidence": [{"source": None, **evidence}] if evidence else [], "fixes": fixes}


GROWTH = finding(
    "memory-growth", "kept by list `outputs` (leak.py:7)", text="fix: .detach().cpu()", source="leak.py:7 f"
)


def test_what_is_right_is_no_mistake():
    assert not list_mistakes(LEAK, [GROWTH, finding("fragmentation"), finding("does-not-fit")])


@pytest.mark.parametrize(
    ("findings", "mistake"),
    [
        ([], "no findings"),
        ([finding("idle-memory", "leak.py:7, .cpu()")], "idle-memory is first, not memory-growth"),
        ([finding("memory-growth", "leak.py:70, .cpu()")], "the first finding does not name leak.py:7"),
        ([finding("memory-growth", "leak.py:7")], "the first finding does not say .cpu()"),
        ([finding("does-not-fit"), GROWTH], "the cause is finding 2, after does-not-fit"),
        ([GROWTH, finding("idle-memory")], "idle-memory is false"),
        ([GROWTH, finding("does-not-fit", fixes=["vocabulary-cap"])], "vocabulary-cap cannot help"),
    ],
)
def test_a_mistake_is_seen(findings, mistake):
    assert list_mistakes(LEAK, findings) == [mistake]


@pytest.mark.parametrize(
    "text",
    [
        "# a program\n# resolved: so\n# run: -q\n# first: a\n# fix: b\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# run: -q\n# first: a\n# fix: b\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# resolved: so\n# run: -q\n# first: a\n# fix: b\n# why: c\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# resolved: so\n# run: -q\n# first: a\n# fix: b\nx = 1\n",
    ],
    ids=["no report", "no resolution", "an unknown key", "no cause"],
)
def test_a_header_that_is_not_understood(text, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"program\.py"):
        read(path)
