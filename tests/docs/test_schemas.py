"""docs/schema is what the types say and what commands answer; tests/cli holds every answer that it reads against it."""

import json
import re
import sys

import fastjsonschema
import pytest

from docs import schemas
from memprof.cli.main import COMMANDS
from memprof.report.documents.report import Report
from tests.golden.test_report import document as a_report
from tests.lanes import by_day
from tests.processes import ROOT, python
from tests.schemas import checked, validator

BESIDE_THE_TESTS_OF_COMMANDS = (
    "models", "gpus", "gpus --present", "cache", "help", "help html", "recipes ls", "recipes cp pythia copy",
    "doctor --env", "doctor docs/doctor_example.log", "estimate --params 1.2B --explain", "profile --model nothing",
)  # fmt: skip


def test_the_files_are_current():
    for path, text in schemas.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run `make docs`"
    assert {path.stem for path in schemas.FOLDER.iterdir()} == set(schemas.FILES)


def test_every_command_has_a_schema():
    said = " ".join(whose for _, whose in schemas.FILES.values())
    commands = set(COMMANDS) - {"mcp"}  # whose answers are those of the others
    assert all(re.search(rf"\b{command}\b", said) for command in commands)


def test_every_document_has_its_version():
    for name in schemas.FILES:
        kinds = [kind.__name__ for kind in schemas.FILES[name][0]]
        for kind in kinds:
            assert schemas.schema_of(name)["definitions"][kind]["properties"]["schema"]["type"] == "integer"


@pytest.mark.parametrize("arguments", by_day(BESIDE_THE_TESTS_OF_COMMANDS, *BESIDE_THE_TESTS_OF_COMMANDS[:8]))
def test_answers(arguments, tmp_path):
    words = [str(ROOT / word) if word.startswith("docs/") else word for word in arguments.split()]
    done = python("-m", "memprof", *words, "--json", folder=tmp_path)
    answer = checked(json.loads(done.stdout))
    assert answer["schema"] == (1 if "error" in answer else 2), done.stderr


def test_lines_of_monitor(tmp_path):
    options = ("--interval", "0.2", "--json", "--", sys.executable, "-c", "import time; time.sleep(0.5)")
    done = python("-m", "memprof", "monitor", *options, folder=tmp_path)
    lines = [checked(json.loads(line)) for line in done.stderr.splitlines()]
    assert "peaks" in lines[0] and lines[-1]["outcome"]["exit_code"] == 0


def test_what_is_not_so_is_refused():
    document = json.loads(json.dumps(a_report(2 << 30).to_json()))
    checked(document)
    peak = document["peak"]
    changed = (
        {"peak": {**peak, "allocated_bytes": "many"}},
        {"peak": {name: value for name, value in peak.items() if name != "tensors"}},
        {"peak": {**peak, "not_said": 1}},
        {"verdict": None},
        {"findings": [{}]},
    )
    for change in changed:
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            validator("report")({**document, **change})


def test_names_are_explained():
    described = schemas.schema_of("report")["definitions"]
    peak = described["Peak"]["properties"]
    assert described[Report.__name__]["properties"]["target"]["anyOf"]
    assert sum("description" in one for one in peak.values()) > len(peak) / 3
    assert described["Verdict"]["properties"]["fits"]["type"] == ["boolean", "null"]
