"""`--largest`: the number that it names fits, the next does not, and both were run."""

import shlex

import pytest

from memprof.flows import limit as limit_flow
from memprof.flows.profile import profile
from memprof.spec import TargetSpec

CNN = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
"""


def _check(memprof, found):
    limit = found["limit"]
    runs = {run["number"]: run for run in limit["runs"]}
    assert limit["first_too_large"] == limit["largest"] + 1
    for number, code in ((limit["largest"], 0), (limit["first_too_large"], 3)):
        alone = memprof(*shlex.split(runs[number]["command"])[1:], "--json")
        assert alone.exit_code == code
        assert alone.json["verdict"]["required_bytes"] == runs[number]["needed_bytes"]
    assert found["verdict"]["required_bytes"] == runs[limit["largest"]]["needed_bytes"]
    assert not any(run["fits"] for number, run in runs.items() if number > limit["largest"])
    return limit


@pytest.mark.slow
def test_the_batch_of_a_cnn(memprof, tmp_path):
    (tmp_path / "cnn.py").write_text(CNN, encoding="utf-8")
    command = ("profile", "--model", f"{tmp_path / 'cnn.py'}:build", "--gpu-vram", 0.6, "--largest", "batch-size")
    result = memprof(*command, "--json")
    assert result.exit_code == 0, result.stderr
    limit = _check(memprof, result.json)
    assert len(limit["runs"]) < 14
    assert memprof(*command, "-q").stdout == f"The largest batch that fits: {limit['largest']:,}\n"
    said = " ".join(memprof(*command).stdout.split())
    assert f"The largest batch that fits: {limit['largest']}" in said
    assert f"{limit['first_too_large']} needs" in said and "and runs out of memory in" in said


def test_a_context_of_what_takes_no_tokens(memprof, tmp_path):
    (tmp_path / "cnn.py").write_text(CNN, encoding="utf-8")
    command = ("profile", "--model", f"{tmp_path / 'cnn.py'}:build", "--gpu-vram", 1, "--largest", "context-length")
    result = memprof(*command)
    assert result.exit_code == 2 and "takes no tokens" in result.stderr


@pytest.mark.slow
def test_the_batch_of_a_script(memprof, script, monkeypatch):
    """Its number stands where the arguments say. In the place of processes, which take long: the same model here."""
    cnn, asked = script(CNN, "cnn.py"), []

    def run_script_process(program, spec):
        assert program.arguments[:2] == ("--steps", "5")
        flag, _, number = program.arguments[2].partition("=")
        assert (flag, spec.fixes, spec.worst_batch) == ("--bs", (), True)
        asked.append(int(number))
        return profile(TargetSpec(model=f"{cnn}:build", batch_size=int(number), gpu_vram_bytes=spec.gpu_vram_bytes))

    monkeypatch.setattr(limit_flow, "run_script_process", run_script_process)
    command = (
        "run",
        "--gpu-vram",
        0.6,
        "--worst-batch",
        "--largest",
        "batch-size",
        "--json",
        script("", "train.py"),
        "--steps",
        5,
    )
    missing = memprof(*command, "--bs", 8)
    assert missing.exit_code == 2 and "{}" in missing.stderr and not asked
    result = memprof(*command, "--bs={}")
    assert result.exit_code == 0, result.stderr
    limit = result.json["limit"]
    assert limit["first_too_large"] == limit["largest"] + 1
    runs = {run["number"]: run for run in limit["runs"]}
    assert sorted(asked) == list(runs)
    assert runs[limit["largest"]]["fits"] and not runs[limit["first_too_large"]]["fits"]
    ending = "--worst-batch --gpu-vram 0.6 train.py --steps 5 --bs="
    assert runs[limit["largest"]]["command"] == f"memprof run {ending}{limit['largest']}"
    # The whole need is seen past the full GPU alone.
    beyond = ending.replace("--worst-batch", "--worst-batch --beyond")
    assert runs[limit["first_too_large"]]["command"] == f"memprof run {beyond}{limit['first_too_large']}"


def test_what_does_not_go_with_it(memprof):
    for others in (("--ladder",), ("--fix", "auto"), ("--device", "cpu")):
        result = memprof("profile", "--model", "gpt2", "--largest", "batch-size", *others)
        assert result.exit_code == 2 and "a search of its own" in result.stderr
