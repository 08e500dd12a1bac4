"""What commands answer in JSON: totals as in totals.json, names as in its schema, back from JSON, and on screens.

`MEMPROF_BLESS=1 pytest tests/golden/test_totals.py --lane nightly` writes totals.json anew; its figures are those of
unit tests, and of the versions of torch and transformers that it names.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from memprof.report.documents.analysis import Analysis
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.estimate import EstimateDocument
from memprof.report.documents.report import Report
from memprof.report.terminal import brief
from tests.golden.screens import assert_no_word_is_broken, assert_on_one_screen
from tests.lanes import by_day
from tests.processes import python
from tests.schemas import checked

TOTALS = Path(__file__).with_name("totals.json")
PROGRAM = Path(__file__).with_name("program.py")
TAKEN_WITH = {"torch": "2.13.0", "transformers": "5.23.0"}
KINDS = {"estimate": EstimateDocument, "analyze": Analysis, "compare": Comparison}  # Of other commands: a report.

_TINY = "profile --model gpt2 --context-length 64 --batch-size 2"
# Name -> commands, of which the last one's answer is looked at.
COMMANDS: dict[str, tuple[str, ...]] = {
    "profile": (_TINY,),
    "profile-lora": (
        "profile --model pythia-70m --context-length 96 --adapter lora --dtype bfloat16 --gradient-accumulation 2 "
        "--activation-checkpointing",
    ),
    "profile-generates": ("profile --model gpt2 --context-length 32 --mode inference --new-tokens 4",),
    "profile-does-not-fit": ("profile --model llama-3.1-8b --context-length 512 --gpu rtx-4090",),
    "profile-fix": (f"{_TINY} --vocab-size 30000 --fix chunked-loss,fused-optimizer",),
    "profile-ladder": ("profile --model gpt2 --context-length 256 --batch-size 4 --gpu-vram 2.5 --ladder",),
    "run": ("run --steps 3 program.py",),
    "run-until-exit": ("run --until-exit program.py",),
    "analyze": (f"{_TINY} --save a.memprof", "analyze a.memprof"),
    "compare": (
        f"{_TINY} --save a.memprof",
        f"{_TINY} --fix chunked-loss --steps 3 --save b.memprof",
        "compare a.memprof b.memprof",
    ),
    "estimate": ("estimate --model llama-3.1-8b --context-length 4096",),
}
# A run that dies is in test_report.py as well, a comparison in cli/; the others are `profile` with one option more.
AT_NIGHT = {"compare", "profile-does-not-fit", "profile-ladder", "profile-lora"}


@pytest.mark.parametrize("name", by_day(COMMANDS, *(name for name in COMMANDS if name not in AT_NIGHT)))
def test_answer(name: str, tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    for command in COMMANDS[name]:
        first, *more = command.split()
        done = python("-m", "memprof", first, "--json", *more, folder=tmp_path)
    values = checked(json.loads(done.stdout))
    document = KINDS.get(values["command"], Report).from_json(values)
    assert document.to_json() == values and type(document).from_json(values) == document
    if not isinstance(document, EstimateDocument):  # which a command alone shows
        for width in (60, 80, 120):
            assert_no_word_is_broken(document._build_view(), width, but_paths=name == "profile-lora")
    if isinstance(document, Report):
        assert_on_one_screen(brief.render(document))
    if all(version(package).partition("+")[0] == taken for package, taken in TAKEN_WITH.items()):
        assert_totals(name, {"exit code": done.exit_code, **totals(values)})


def totals(values: dict[str, Any]) -> dict[str, Any]:
    """The verdict and the bytes of a whole run, or of each that the answer is about."""
    match values["command"]:
        case "estimate":
            estimates = values["estimates"]
            return {f"{one['method']}, {one['dtype']}, {one['moment']}": one["device_used_bytes"] for one in estimates}
        case "compare":
            return {f"{one['name']} {run}": one[f"{run}_bytes"] for one in values["totals"] for run in ("a", "b")}
        case "analyze":
            [device] = values["devices"]
            moments = {"peak": device["peak"], "end": device["end"]}
            return {f"{at} {name}": bytes_ for at, held in moments.items() for name, bytes_ in of_bytes(held).items()}
    peak = values["peak"]
    findings = ", ".join(one["id"] for one in values["findings"])
    return {"fits": values["verdict"]["fits"], "findings": findings, **of_bytes(peak), **peak["categories"]}


def of_bytes(values: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in values.items() if name.endswith("_bytes")}


def assert_totals(name: str, now: dict[str, Any]) -> None:
    kept = json.loads(TOTALS.read_text(encoding="utf-8"))
    before = kept.get(name, {})
    changes = [f"{of}: {before.get(of)} -> {now.get(of)}" for of in {**before, **now} if before.get(of) != now.get(of)]
    if changes and os.environ.get("MEMPROF_BLESS"):
        TOTALS.write_text(json.dumps({**kept, name: now}, indent=1) + "\n", encoding="utf-8")
    assert not changes, f"look, then bless it with MEMPROF_BLESS=1: {'; '.join(changes)}"
