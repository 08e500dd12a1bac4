"""Every command and script that an output prints is run, and gives what was claimed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from memprof.command_line import profile_command
from memprof.remedies.fixes import edit_spec, parse_fixes
from memprof.remedy_catalog import REMEDIES, Tier, find_remedies, tiers
from memprof.spec import TargetSpec
from memprof.units import parse_gib, spell_size
from tests.processes import python

TINY = ("--model-size", "1M", "--gpu-vram", "2")
DELTA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.00 GiB memory in use. Of the "
    "allocated memory 18.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.\n"
)


def printed(text: str) -> list[list[str]]:
    """The commands of memprof in an output, without the program's name."""
    joined = re.sub(r" \\\n\s*", " ", text)
    found = re.findall(r"^ *(?:Saved: )?(memprof (?:profile|show|analyze|run) .+)$", joined, re.MULTILINE)
    return [shlex.split(command)[1:] for command in found]


@pytest.mark.slow
def test_what_fits_a_card(memprof):
    """Each model that is said to fit does, at its longest context, with what the search has switched on for it."""
    result = memprof("recommend", "--gpu-vram", "0.6", "--context-length", "64")
    commands = printed(result.stdout)
    assert result.exit_code == 0 and commands, result.stderr
    for command in commands:
        assert memprof(*command).exit_code == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("goal", [("--infer",), ("--train", "full"), ("--train", "lora")], ids=" ".join)
def test_a_recommendation_without_a_length(memprof, goal, tmp_path):
    result = memprof("recommend", *TINY, *goal, "--effective-batch", "1", "--batch-size", "1", "--json")
    assert result.exit_code == 0, result.stderr
    answer = result.json
    command = shlex.split(answer["chosen"]["command"])[1:]
    again = memprof(*command, "--json")
    assert again.exit_code == 0
    assert again.json["verdict"]["required_bytes"] == answer["chosen"]["needed_bytes"]
    for name, script in answer["snippets"].items():
        file = tmp_path / f"{name}.py"
        file.write_text(script, encoding="utf-8")
        done = python("-m", "memprof", "run", "--gpu-vram", "2", "--steps", "1", file, folder=tmp_path)
        assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_doctor_on_a_weight_delta(memprof, tmp_path):
    """Case study 1: 4 x 512 tokens, a matrix of 4096 x 14336 for each."""
    log = tmp_path / "train.log"
    log.write_text(DELTA, encoding="utf-8")
    said = memprof("doctor", log, "--model", "llama-3.1-8b", "--batch-size", 4, "--context-length", 512)
    commands = printed(said.stdout)
    assert printed(memprof("doctor", log).stdout)[0][-1] == "low-rank-npt"  # also where nothing says which model
    assert "--npt" in commands[0] and commands[0][-1] == "low-rank-npt"
    assert memprof(*commands[0]).exit_code == 0
    for command in commands:  # each can be run: nothing that it asks for is refused
        _applies(command)


@pytest.mark.parametrize("case", ["logits", "weights", "spilled"])
def test_doctor_advises_what_applies(memprof, tmp_path, case):
    log = tmp_path / "train.log"
    log.write_text(DELTA.replace("448.00 GiB", "37.09 GiB" if case == "logits" else "2.00 GiB"), encoding="utf-8")
    for options in ((), ("--model", "qwen3-4b"), ("--model", "gpt2", "--batch-size", 8)):
        for command in printed(memprof("doctor", log, *options).stdout):
            _applies(command)


def _applies(command: list[str]) -> None:
    """`memprof profile` takes the spec and the remedies together."""
    options = dict(zip(command[1::2], command[2::2], strict=True))
    fix = options.pop("--fix", "")
    names = {"--gpu-vram": "gpu_vram_bytes"}
    values = {names.get(flag, flag[2:].replace("-", "_")): value for flag, value in options.items()}
    for name, value in values.items():
        values[name] = parse_gib(value) if name == "gpu_vram_bytes" else int(value) if value.isdigit() else value
    spec = TargetSpec(**values)
    for one in [] if fix in ("", "auto") else parse_fixes(fix):
        edit_spec(spec, one, {"dtype": "float32" if spec.model in ("gpt2", "MODEL") else "bfloat16"})


def test_what_would_help_can_be_asked_for(memprof, tmp_path):
    saved = tmp_path / "run.memprof"
    command = ("profile", "--model", "gpt2", "--context-length", 256, "--batch-size", 4, "--gpu-vram", 2.5)
    result = memprof(*command, "--save", saved)
    assert result.exit_code == 3
    (show,) = printed(result.stderr)
    shown = memprof(*show)
    assert shown.exit_code == 3 and shown.stdout == result.stdout
    words = " ".join(result.stdout.split())
    named = re.findall(r"would help: ((?:[\w-]+(?:=N)?, )*[\w-]+(?:=N)?)", words)
    names = sorted({name for found in named for name in found.split(", ")})
    assert {"amp-bfloat16", "bfloat16", "vocabulary-cap=N"} <= set(names)
    for name in names:
        done = edit_spec(
            TargetSpec(model="gpt2", context_length=256, batch_size=4),
            *parse_fixes(name.replace("=N", "=30000")),
            {"dtype": "float32", "vocab_size": 50257},
        )
        assert done != TargetSpec(model="gpt2", context_length=256, batch_size=4)


def test_a_forward_alone_is_not_told_to_train_otherwise(memprof, tmp_path):
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nm = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(4)]).cuda()\n"
        "with torch.no_grad():\n    print(m(torch.zeros(4, 8192, device='cuda')).shape)\n",
        encoding="utf-8",
    )
    # Past the full card: a run that ends there has not shown what it is.
    options = ("--gpu-vram", "1", "--beyond", "--until-exit", "--json")
    done = python("-m", "memprof", "run", *options, script, folder=tmp_path)
    found = json.loads(done.stdout)["findings"]
    assert any(finding["id"] == "does-not-fit" for finding in found)
    assert not {name for finding in found for name in finding["remedies"] if REMEDIES[name].training_only}


# -- ladder and search -------------------------------------------------------------------------------------------------

MISPLACED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.shift = torch.ones(64)

    def forward(self, x):
        return (self.layer(x) + self.shift).sum()

def factory():
    return Model()

def double():
    return torch.nn.Linear(64, 64).double()
"""


@pytest.fixture
def models(tmp_path) -> Path:
    file = tmp_path / "models.py"
    file.write_text(MISPLACED, encoding="utf-8")
    return file


def test_a_model_in_float64(memprof, models):
    result = memprof("profile", "--model", f"{models}:double", "--mode", "inference", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.json["target"]["dtype"] == "float64"


def test_a_device_mismatch_is_mended_by_the_search(memprof, models):
    result = memprof("profile", "--model", f"{models}:factory", "--fix", "auto")
    assert "device-placement is enough" in " ".join(result.stdout.split()), result.stdout + result.stderr


def test_members_of_a_tier_go_together_but_where_one_stands_for_another():
    for name, members in tiers():
        pairs = {(one, other) for one in members for other in members if other in REMEDIES[one].conflicts}
        # The search tries the first of each as well.
        assert pairs <= {(one, "optimizer-in-backward") for one in ("fused-optimizer", "micro-batch")}, name
    assert "cpu-offload-weights" in dict(tiers())[Tier.STREAMED_WEIGHTS]
    order = [name for name, _ in tiers()]
    assert order.index(Tier.EXACT) < order.index(Tier.AUTOCAST) < order.index(Tier.HALF_WEIGHTS)


def test_weights_are_streamed_where_nothing_less_is_enough(memprof):
    options = ("--model", "pythia-160m", "--context-length", 64, "--gpu-vram", 1.15, "--mode", "inference")
    result = memprof("profile", *options, "--dtype", "float32", "--batch-size", 1, "--fix", "cpu-offload-weights")
    assert result.exit_code == 0, result.stderr


def test_micro_batches_of_an_inference_do_all_of_its_work():
    spec = TargetSpec(model="gpt2", mode="inference", batch_size=8)
    (fix,) = parse_fixes("micro-batch=2")
    done = edit_spec(spec, fix, {})
    assert done.batch_size * done.gradient_accumulation == 8


def test_rows_of_several_remedies_are_full(memprof):
    result = memprof("profile", *TINY, "--context-length", 64, "--fix", "chunked-loss,activation-checkpointing")
    rows = [line for line in result.stdout.splitlines() if re.match(r"  (\+|  and) (chunked|activ)", line)]
    assert len(rows) == 2 and rows[0].endswith("exact") and rows[1] == "    and activation-checkpointing"
    assert "  chunked-loss: " in result.stdout and "  activation-checkpointing: " in result.stdout


# -- a run as a command ------------------------------------------------------------------------------------------------


def test_a_command_is_its_spec():
    spec = TargetSpec(model="4B", model_is_size=True, quantize="nf4", double_quant=False, adapter="lora")
    words = shlex.split(profile_command(spec.edit(gpu_vram_bytes=parse_gib(8), workspaces=False)))
    assert words[2:6] == ["--model-size", "4B", "--quantize", "nf4"]
    assert {"--no-double-quant", "--no-workspaces", "--gpu-vram"} <= set(words) and words[-1] == "8"
    assert "--lora-rank" not in words
    assert find_remedies("lora")


@pytest.mark.parametrize("size", ["8", "0.6", "24GB", "79.1", "7807MiB", "1234567b"])
def test_a_size_is_spelt_as_it_is_read(size):
    assert parse_gib(spell_size(parse_gib(size))) == parse_gib(size)
    assert len(spell_size(parse_gib(size))) <= len(size)
