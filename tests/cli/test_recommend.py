"""`memprof recommend`: usage error is one error, exit code 2, before anything is run."""

import dataclasses
import sys

import pytest

from memprof.cli import main
from memprof.cli.recommend import _run_row
from memprof.errors import UsageError
from memprof.report.documents.recommendation import LargestModel, Recommendation
from memprof.report.terminal.recommendation import print_recommendation
from memprof.trace.facts import DeviceFacts


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu-vram", "banana"], "not an amount of memory"),
        (["--gpu-vram", "-8"], "not an amount of memory"),
        (["--gpu", "rtx-4090", "--gpu-vram", "8"], "not both"),
        (["--gpu", "rtx-4091"], "unknown GPU"),
        (["--adapter", "lora", "--gpu-vram", "8"], "needs a model"),
        (["--model", "gpt2", "--adapter", "lorra", "--gpu-vram", "8"], "unknown --adapter"),
        (["--model", "gpt2", "--adapter", "lora", "--mode", "inference", "--gpu-vram", "8"], "is for training"),
        (
            ["--model", "gpt2", "--quantize", "nf4", "--gpu-vram", "8"],
            "add --adapter lora, --npt low-rank or --mode inference",
        ),
        (["--model", "gpt2", "--adapter", "lora", "--quantize", "fp4", "--gpu-vram", "8"], "give --quantize nf4"),
        (["--model", "gpt2", "--lora-rank", "4", "--gpu-vram", "8"], "add --adapter lora"),
        (["--model", "gpt2", "--lengths", "none.txt", "--gpu-vram", "8"], "no such file"),
        (["--model", "gpt2", "--batches", "9", "--gpu-vram", "8"], "--batches needs --lengths"),
        (["--model", "gpt2", "--lengths", "lognormal:9", "--gpu-vram", "8"], "a mean and a sigma"),
        (["--model", "gpt2", "--effective-batch", "0", "--gpu-vram", "8"], "at least 1"),
    ],
)
def test_wrong_use(memprof, arguments, problem):
    result = memprof("recommend", *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_the_limit_was_run_on_both_sides(memprof):
    """The configuration is confirmed by `memprof profile`; a batch more does not fit."""
    arguments = ["--model-size", "1M", "--adapter", "lora", "--context-length", "256", "--gpu-vram", "0.6"]
    result = memprof("recommend", *arguments, "--effective-batch", "2", "--json")
    assert result.exit_code == 0, result.stderr
    answer = result.json
    chosen, batch = answer["chosen"], answer["batch"]
    assert chosen["fits"] and batch["first_too_large"] == batch["largest"] + 1
    command = chosen["command"].split()[1:]
    assert memprof(*command).exit_code == 0
    size = command.index("--batch-size") + 1 if "--batch-size" in command else None
    for count, code in ((batch["largest"], 0), (batch["first_too_large"], 3)):
        changed = [*command, "--batch-size", str(count)] if size is None else [*command]
        if size is not None:
            changed[size] = str(count)
        assert memprof(*changed).exit_code == code


@pytest.mark.nightly
def test_over_batches_of_the_data(memprof, capsys):
    """What was found, over batches: as `memprof profile` has it with the same lengths."""
    arguments = ["--model-size", "1M", "--adapter", "lora", "--context-length", "256", "--gpu-vram", "0.6"]
    data = ["--lengths", "lognormal:100,0.5"]
    result = memprof("recommend", *arguments, *data, "--batches", 12, "--batch-size", 2, "--json")
    assert result.exit_code == 0, result.stderr
    chosen, stream = result.json["chosen"], result.json["lengths"]["stream"]
    assert (stream["batches"], stream["fits"], stream["alloc_conf"]) == (12, True, None)
    profiled = memprof(*chosen["command"].split()[1:], *data, "--steps", 12, "--json").json
    assert stream["reserved"] == profiled["batches"]["reserved"]
    print_recommendation(Recommendation.from_json(result.json), explain=False)
    assert "Over 12 batches of these lengths, it fits all of them" in " ".join(capsys.readouterr().out.split())


def test_a_way_that_could_not_be_run_is_named(memprof, monkeypatch):
    for package in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    result = memprof(
        "recommend", "--gpu-vram", 0.5, "--model", "pythia-70m", "--mode", "inference", "--context-length", 128
    )
    assert result.exit_code == 3
    assert "1 sequence at a time" in result.stdout
    said = " ".join(result.stdout.split())
    assert "Could not be run: nf4 weights" in said and "needs bitsandbytes" in said


@pytest.mark.parametrize(("number", "arguments"), [(1, ["profile", "--model", "a b"]), (2, None), (3, None), (4, None)])
def test_a_row_is_run_by_its_number(monkeypatch, number, arguments):
    """Of the second row no model fits; there is no fourth, and no third."""
    row = LargestModel("inference", "a b", 1, 1, 1, 1, None, None, None, "memprof profile --model 'a b'")
    result = Recommendation(DeviceFacts("A", 1 << 30), largest=(row, dataclasses.replace(row, model=None)))
    called = []
    monkeypatch.setattr(main, "run", called.append)
    if arguments is None:
        with pytest.raises(UsageError, match="no such row"):
            _run_row(result, number)
    else:
        _run_row(result, number)
        assert called == [arguments]
