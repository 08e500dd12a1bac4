"""`memprof sweep` as it is typed: its table in all forms, its exit codes, and that it goes on where it was."""

import json

import pandas
import pytest

from tests.processes import python
from tests.schemas import checked

SWEEP = ("sweep", "--model-size", "1M", "--gpu-vram", "0.3,2", "--context-length", "16", "--batch-size", "1,2")


def test_a_sweep_in_all_forms(tmp_path):
    files = ("--csv", "tables", "--parquet", "cells.parquet", "--store", "answers")
    done = python("-m", "memprof", *SWEEP, "--exact", "--json", *files, folder=tmp_path)
    assert done.exit_code == 0, done.stderr
    document = checked(json.loads(done.stdout))
    assert [row["answer"]["fits"] for row in document["rows"]] == [False] * 2 + [True] * 2
    frames = [pandas.read_csv(tmp_path / "tables/cells.csv"), pandas.read_parquet(tmp_path / "cells.parquet")]
    for frame in frames:
        assert frame["needed_bytes"].tolist() == [row["answer"]["needed_bytes"] for row in document["rows"]]
        assert frame["batch_size"].tolist() == [1, 2] * 2
    assert len(pandas.read_csv(tmp_path / "tables/frontier.csv")) == 1
    (tmp_path / "sweep.json").write_text(done.stdout)
    shown = python("-m", "memprof", "show", "sweep.json", folder=tmp_path)
    assert shown.exit_code == 0 and "2 of 4 cells fit." in shown.stdout
    again = python("-m", "memprof", *SWEEP, "--exact", "-q", *files[-2:], folder=tmp_path)
    assert "4 run on the virtual GPU, 4 of an earlier sweep" in again.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt2", "--batch-size", "1,x"), "--batch-size: not a whole number"),
        (("--model", "gpt2", "--batch-size", "1,,2"), "an axis has an empty value: batch_size"),
        (("--model", "gpt2", "--batch-size", "nan"), "--batch-size: not a whole number"),
        (("--model", "gpt2", "--batch-size=-1,2"), "--batch-size must be at least 1"),
        (("--model", "gpt2", "--gpu", "t4,nosuch"), "unknown GPU"),
        (("--model", "gpt2", "--batch-size", ",".join(map(str, range(1, 200_002)))), "the sweep has too many cells"),
        (("--model", "gpt2", "--workers", "0"), "--workers must be at least 1"),
        (("--config", "date.yaml"), "batch-size has no value that an option has"),
        (("--model", "gpt2", "--store", "nosuch://bucket"), "no such address"),
        (("--model", "gpt2", "--executor", "ray:1", "--batch-size", "4096"), "no such executor"),
        (("--model", "gpt2", "--no-stubs"), "--no-stubs is for a script"),
        (("sweep.yaml",), "this is no script"),
        (("--dtype", "bfloat16", "train.py"), "--dtype is for models"),
        (("train.py", "{batch}", "--", "batch"), "no axis of the script"),
        (("train.py", "--", "batch=1"), "no place for batch"),
        (("train.py", "{batch}", "--", "batch=1", "batch=2"), "an axis of the script is given twice"),
        (("--gpus", "1,2", "train.py"), "a script has one number of GPUs"),
        (("--model", "gpt2", "--store", "train.py"), "this is a file, not a folder"),
        (("--model", "gpt2", "--parquet", "nosuch/cells.parquet"), "no such folder"),
    ],
)
def test_wrong_uses(memprof, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "date.yaml").write_text("model: gpt2\nbatch-size: 2024-01-01\n")
    result = memprof("sweep", *words)
    assert result.exit_code == 2 and said in result.stderr, result.stderr


def test_options_from_a_file(memprof, tmp_path, monkeypatch):
    """Nothing is run: the estimate answers these."""
    monkeypatch.setenv("MEMPROF_CACHE", "off")
    (tmp_path / "sweep.yaml").write_text("model: pythia-410m\nbatch-size: [1, 2, 4096]\ngpu: h100-80gb\nfix: [none]\n")
    result = memprof("sweep", "--config", tmp_path / "sweep.yaml", "--context-length", 512, "--json")
    assert result.exit_code == 0, result.stderr
    assert [row["answer"]["how"] for row in checked(result.json)["rows"]] == ["estimate"] * 3
    assert [row["answer"]["fits"] for row in result.json["rows"]] == [True, True, False]
    nothing = memprof("sweep", "--model", "pythia-410m", "--batch-size", "4096,8192", "--gpu", "h100-80gb", "-q")
    assert nothing.exit_code == 3 and nothing.stdout.startswith("0 of 2 cells fit.")
