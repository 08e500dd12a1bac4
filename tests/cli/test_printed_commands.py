"""Every command and script that an output prints is run, and gives what was claimed."""

from __future__ import annotations

import ast
import bz2
import gzip
import io
import itertools
import json
import lzma
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from memprof.cli.main import app
from memprof.command_line import make_profile_command
from memprof.device.catalog import find_gpu
from memprof.doctor import diagnose
from memprof.fixes.catalog import FIXES, Tier, find_fixes, find_precision_reason, list_tiers
from memprof.fixes.chosen import edit_spec, parse_fixes
from memprof.spec import TargetSpec
from memprof.units import format_size_option, parse_gib
from tests.lanes import at_night, examples
from tests.processes import ROOT, python
from tests.unit.doctor.corpus import messages

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


@pytest.mark.nightly
def test_what_fits_a_gpu(memprof):
    """Each model that is said to fit does, at its longest context, with what the search has switched on for it."""
    request = ("recommend", "--gpu-vram", "0.6", "--context-length", "64")
    result = memprof(*request, "--json")
    rows = [number for number, row in enumerate(result.json["largest"], 1) if row["model"] is not None]
    assert result.exit_code == 0 and rows, result.stderr
    for number in rows:
        assert memprof(*request, "--row", number).exit_code == 0, number


@pytest.mark.nightly
@pytest.mark.parametrize(
    "goal", ["--mode inference", "--mode train", "--adapter lora", "--adapter lora --quantize nf4"]
)
def test_a_recommendation_without_a_length(memprof, goal, tmp_path):
    result = memprof("recommend", *TINY, *goal.split(), "--effective-batch", "1", "--batch-size", "1", "--json")
    assert result.exit_code == 0, result.stderr
    answer = result.json
    for choice in [answer["chosen"], *answer["choices"][1:3]]:
        again = memprof(*shlex.split(choice["command"])[1:], "--json")
        assert again.exit_code == (0 if choice["fits"] else 3)
        assert again.json["verdict"]["required_bytes"] == choice["needed_bytes"]
    assert answer["snippets"]
    for name, script in answer["snippets"].items():
        file = tmp_path / f"{name}.py"
        file.write_text(script, encoding="utf-8")
        done = python("-m", "memprof", "run", "--gpu-vram", "2", "--json", file, folder=tmp_path)
        assert done.exit_code == 0, done.stderr
        needed, said = json.loads(done.stdout)["verdict"]["required_bytes"], answer["chosen"]["needed_bytes"]
        # No more than was said, but for a segment; less, for a script lets go of the logits when it has the loss.
        assert 0.9 * said <= needed <= said + (2 << 20), name


@pytest.mark.nightly
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
    """`memprof profile` takes the spec and the fixes together."""
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
    words = " ".join(memprof("show", "--full", saved).stdout.split())
    names = sorted(set(re.findall(r"- ([\w-]+(?:=\d+)?): needs", words)))
    assert {"bfloat16", "cpu-offload-optimizer", "cpu-offload-weights"} <= set(names)
    for name in names:
        spec = TargetSpec(model="gpt2", context_length=256, batch_size=4)
        done = edit_spec(spec, *parse_fixes(name), {"dtype": "float32", "vocab_size": 50257})
        assert done != TargetSpec(model="gpt2", context_length=256, batch_size=4)


def test_a_forward_alone_is_not_told_to_train_otherwise(memprof, tmp_path):
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nm = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(4)]).cuda()\n"
        "with torch.no_grad():\n    print(m(torch.zeros(4, 8192, device='cuda')).shape)\n",
        encoding="utf-8",
    )
    # Past the full GPU: a run that ends there has not shown what it is.
    options = ("--gpu-vram", "1", "--beyond", "--until-exit", "--json")
    done = python("-m", "memprof", "run", *options, script, folder=tmp_path)
    found = json.loads(done.stdout)["findings"]
    assert any(finding["id"] == "does-not-fit" for finding in found)
    assert not {name for finding in found for name in finding["fixes"] if FIXES[name].training_only}


# -- what an output advises, on a run that dies ------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50_000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def small(tmp_path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    return file


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_advised_for_a_run_that_died_helps(memprof, small, tmp_path):
    """Of a run that dies in its logits: what findings and doctor name is run, and is of use."""
    run = ("profile", "--model", small, "--context-length", 2048, "--batch-size", 2, "--gpu-vram", 2)
    died = memprof(*run, "--json")
    assert died.exit_code == 3
    report, needed = died.json, died.json["verdict"]["required_bytes"]

    (finding,) = [finding for finding in report["findings"] if finding["id"] == "does-not-fit"]
    for name in finding["fixes"][: examples(len(finding["fixes"]))]:
        value = "=30000" if name == "vocabulary-cap" else ""
        fixed = memprof(*run, "--fix", name + value, "--json")
        assert fixed.exit_code in (0, 3) and fixed.json["verdict"]["required_bytes"] < needed, name

    log = tmp_path / "train.log"
    log.write_text(f"torch.OutOfMemoryError: {report['verdict']['oom_message']}\n", encoding="utf-8")
    said = memprof("doctor", log, "--model", small, "--batch-size", 2, "--context-length", 2048)
    assert ", logits" in said.stdout.splitlines()[0]
    commands = printed(said.stdout)
    assert commands[0][-1] == "chunked-loss" and ["--fix", "auto"] in [command[-2:] for command in commands]
    for command in commands:
        helps = command[-1] in ("auto", "chunked-loss")  # what searches, and what is against this very tensor
        if helps or at_night():
            done = memprof(*command, "--json")
            assert done.json["verdict"]["required_bytes"] <= needed, command
            assert not helps or done.exit_code == 0


@pytest.mark.slow
def test_every_command_of_the_doctor_runs(memprof, small, tmp_path, monkeypatch):
    """Whatever it says to any message that is known here, for a model that is not: a small one stands in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n", encoding="utf-8")
    (tmp_path / "small.py").write_text("import torch\ntorch.ones(9, device='cuda')\n", encoding="utf-8")
    saved = ("--context-length", 64, "--gpu-vram", 2, "--save", "run.memprof")
    assert memprof("profile", "--model", small, *saved).exit_code == 0
    commands = dict.fromkeys(
        advice.command
        for name in ("messages.toml", "messages_held_out.toml", "messages_last.toml")
        for message in messages(name)
        for diagnosis in diagnose(io.BytesIO(message.text.encode()), "message")
        for advice in diagnosis.steps
        if (advice.command or "").startswith("memprof ")
    )
    assert len(commands) > 30
    small_ones = {"--model": str(small), "--context-length": "64", "--batch-size": "2"}
    ran = set()
    by_day = [command for command in commands if not command.startswith("memprof run ")][::5]  # in a new process each
    for command in commands if at_night() else by_day:
        on_any_gpu = re.sub(r" --gpu-vram \S+", "", command)
        words = shlex.split(on_any_gpu.replace("SNAPSHOT", "run.memprof"))[1:]
        if words[0] == "profile":
            words = [small_ones.get(before, word) for before, word in itertools.pairwise(["", *words])]
        if words[0] == "run":  # the script that was reported is not here
            (script,) = (position for position, word in enumerate(words) if word.endswith(".py"))
            words = [*words[:script], "small.py"]
        if tuple(words) not in ran:
            ran.add(tuple(words))
            if words[0] == "run":
                done = python("-m", "memprof", *words, folder=tmp_path)
                assert done.exit_code == 0, (command, done.stderr)
                continue
            done = memprof(*words)
            assert done.exit_code == 0, (command, done.stderr)
    assert len(ran) > (10 if at_night() else 6)


# -- hints -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("estimate",), ("run",)])
def test_what_an_error_gives_for_instance_runs(memprof, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(9, device='cuda')\n", encoding="utf-8")
    wrong = memprof(*arguments)
    (command,) = re.findall(r"hint:  for instance: memprof (.+)", wrong.stderr)
    assert wrong.exit_code == 2
    done = python("-m", "memprof", *shlex.split(command), folder=tmp_path)
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(("name", "opened"), [("gz", gzip.open), ("bz2", bz2.open), ("xz", lzma.open)])
def test_what_unpacks_a_log_is_named(memprof, name, opened, tmp_path):
    file = tmp_path / f"train.log.{name}"
    with opened(file, "wt") as log:
        log.write(DELTA)
    refused = memprof("doctor", file)
    (command,) = re.findall(r"hint:  (\w+ FILE \| memprof) doctor", refused.stderr)
    unpacked = subprocess.run(
        command.replace("FILE", str(file)).partition(" |")[0], shell=True, capture_output=True, text=True, check=True
    )
    assert unpacked.stdout == DELTA


FOREIGN_CODES = (
    "docker ",
    "sglang ",
    "vllm ",
    "llama-server ",
    "nvidia-smi ",
    "sbatch ",
    "--mem",
    "torchrun",
    "python ",
    "pip install",
    "--batch[",
    "llama-quantize ",
)
OPTIONS_OF_OTHERS = (
    "launchers.py",
    "multi_gpu_scripts.py",
    "script.py",
    "engine_budget.py",
    "engine_starts.py",
    "installation.py",
)


def test_every_option_that_a_text_names_is_there():
    """In all that memprof may print: an option that was renamed is not advised on."""
    command = typer.main.get_command(app)
    known = {"--help", "--epochs", "--markers", "--strict-markers"} | {
        option
        for group in (command, command.commands["recipes"])
        for one in (group, *group.commands.values())
        for parameter in one.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    wrong = {}
    for file in sorted((ROOT / "memprof").rglob("*.py")):
        if file.parent.name in ("engines", "serving", "sglang", "vllm") or file.name in OPTIONS_OF_OTHERS:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for text in said:
            if any(other in text for other in FOREIGN_CODES) or text.startswith(" --"):  # the end of another's command
                continue
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text))
            wrong |= {option: file.relative_to(ROOT) for option in named - known}
    assert not wrong


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


@pytest.mark.parametrize("gpu", ["h100", "t4"])
def test_members_of_a_tier_go_together_but_where_one_stands_for_another(gpu):
    for name, all_members in list_tiers():
        members = [one for one in all_members if not find_precision_reason(FIXES[one], find_gpu(gpu), trains=False)]
        pairs = {(one, other) for one in members for other in members if other in FIXES[one].conflicts}
        # The search tries the first of each as well.
        alternatives = ("fused-optimizer", "micro-batch", "amp-float16")
        assert pairs <= {(one, "optimizer-in-backward") for one in alternatives}, name
    assert "cpu-offload-weights" in dict(list_tiers())[Tier.STREAMED_WEIGHTS]
    order = [name for name, _ in list_tiers()]
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


def test_rows_of_several_fixes_are_full(memprof):
    result = memprof(
        "profile", "--full", *TINY, "--context-length", 64, "--fix", "chunked-loss,activation-checkpointing"
    )
    rows = [line for line in result.stdout.splitlines() if re.match(r"  (\+|  and) (chunked|activ)", line)]
    assert len(rows) == 2 and rows[0].endswith("exact") and rows[1] == "    and activation-checkpointing"
    assert "  chunked-loss: " in result.stdout and "  activation-checkpointing: " in result.stdout


# -- a run as a command ------------------------------------------------------------------------------------------------


def test_a_command_is_its_spec():
    spec = TargetSpec(model="4B", model_is_size=True, quantize="nf4", double_quant=False, adapter="lora")
    words = shlex.split(make_profile_command(spec.edit(gpu_vram_bytes=parse_gib(8), workspaces=False)))
    assert words[2:6] == ["--model-size", "4B", "--quantize", "nf4"]
    assert {"--no-double-quant", "--no-workspaces", "--gpu-vram"} <= set(words) and words[-1] == "8"
    assert "--lora-rank" not in words
    assert find_fixes("lora")


@pytest.mark.parametrize("size", ["8", "0.6", "24GB", "79.1", "7807MiB", "1234567b"])
def test_a_size_is_spelt_as_it_is_read(size):
    assert parse_gib(format_size_option(parse_gib(size))) == parse_gib(size)
    assert len(format_size_option(parse_gib(size))) <= len(size)
