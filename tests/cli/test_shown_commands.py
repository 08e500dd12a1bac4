"""Every command that the documentation shows is run: as it stands where its output is shown (tests/docs), else here,
with a small model in the place of its own.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil

import pytest

from tests.docs.test_docs import PAGES, _commands
from tests.processes import ROOT

SHOWN = {
    command
    for page in PAGES
    for command in re.findall(r"<!-- output of: ([^\n;]+?)(?:;[^\n]*)? -->", page.read_text(encoding="utf-8"))
}
SHOWN |= {command.replace(" --full", "") for command in SHOWN}  # the first screen of the same run
ELSEWHERE = {
    "memprof recommend --gpu-vram 8": "test_printed_commands.py, on a smaller GPU",
    "memprof recommend --model llama-3.1-8b --adapter lora --gpu rtx-4090 --context-length 8192": "likewise",
    "memprof recommend --model llama-3.1-8b --adapter lora --gpu rtx-4090": "likewise",
    "memprof recommend --model qwen3-0.6b --gpu rtx-4070 --lengths lengths.txt": "test_recommend.py, with batches",
    "memprof profile --model cnn.py:build --gpu rtx-4070 --largest batch-size": "test_largest.py",
    "memprof profile --full --model docs/stories/cnn.py:build --gpu rtx-4070 --largest batch-size": "likewise",
    "memprof profile --model qwen3-0.6b --gpu rtx-4090 --largest context-length": "likewise",
    "memprof run --largest batch-size train.py --batch-size {}": "likewise",
    "memprof recommend --model llama-3.1-8b --adapter lora --gpu rtx-4090 --context-length 8192 --html choice.html": (
        "test_html_answers.py, with a smaller model"
    ),
    "memprof run --gpu m4-max-64gb train.py": "unit/virtual/test_device_types.py: a program for mps",
    "memprof run --gpu arc-b580 train.py": "likewise",
    "memprof sweep --gpu t4,rtx-4090 train.py --batch-size {batch} -- batch=8,16,32": (
        "unit/flows/sweep/test_executors.py"
    ),
    "memprof sweep --model gpt2 --batch-size 1,4 --executor dask:tcp://HOST:8786": "likewise",
    **dict.fromkeys(_commands("memprof run -q"), "tests/docs/test_long_context.py"),
    "memprof monitor": "test_monitor.py: it goes on until it is interrupted",
    **dict.fromkeys(_commands("memprof recipes run"), "tests/recipes"),
    **dict.fromkeys(_commands("memprof verify"), "test_verify.py, with other fixes and models"),
}
COMMANDS = [command for command in _commands("memprof") if command not in SHOWN | ELSEWHERE.keys()]
# These make many runs or compile: test_ladder.py and tests/unit/workload/test_compile.py are in every run.
AT_NIGHT = ("--ladder", "--compile", "--compile-layers", "auto")
SIMULATES = ("profile", "recommend", "sweep", "vocab")
# Options of what is simulated; the doctor and estimates, which are quick, have theirs.
SMALL = {"--model": "path/to/config.json", "--model-size": "1M", "--context-length": "64", "--batch-size": "2"}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
MODEL = """
import transformers

def build_model():
    return transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained("path/to/config.json"))
"""
SCRIPT = """
import torch
import transformers

model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained("path/to/config.json")).cuda()
optimizer = torch.optim.SGD(model.parameters())
tokens = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
for step in range(2):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TEXT = "a b c\nb c\n" * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name, there."""
    tokenizers = pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("shown")
    for name in ("path/to", "my-model", "data", "corpus", "docs", "bin"):
        (place / name).mkdir(parents=True)
    (place / "docs/doctor_example.log").symlink_to(ROOT / "docs/doctor_example.log")
    (place / "docs/run_example.py").write_text(SCRIPT)
    (place / "path/to/config.json").write_text(json.dumps(CONFIG))
    (place / "my-model/config.json").write_text(json.dumps(CONFIG))
    (place / "path/to/model.py").write_text(MODEL)
    # `monitor` starts it by whatever `python` there is, which may have no torch; under `run` it is on the GPU.
    (place / "train.py").write_text(
        "import importlib.util\n"
        "if importlib.util.find_spec('torch'):\n"
        "    import torch\n"
        "    torch.ones(4, device='cuda' if torch.cuda.is_available() else 'cpu')\n"
    )
    (place / "lengths.txt").write_text("12\n20\n16\n")
    (place / "wiki.train.tokens").write_text(TEXT)
    (place / "corpus/one.txt").write_text(TEXT)
    with gzip.open(place / "data/one.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines())
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(place / "tokenizer.json")
    )
    (place / "bin/torchrun").write_text('#!/bin/sh\nshift 2\nexec python "$@"\n')
    (place / "bin/torchrun").chmod(0o755)
    return place


def _small(command: str) -> list[str]:
    """The command's words, and of what is simulated a small model's."""
    words = shlex.split(command, comments=True)[1:]
    if "--engine" in words:  # in closed form
        return words
    if words[0] in SIMULATES or "--exact" in words:
        for at, word in enumerate(words[:-1]):
            if word in SMALL and not (word == "--model" and ":" in words[at + 1]):
                words[at + 1] = SMALL[word]
    if words[0] == "profile" and "--lengths" in words and "--steps" not in words:
        words += ["--steps", "3"]  # of 200
    if words[0] == "recommend" and "--engine" not in words:
        gpus = words[words.index("--gpus") + 1] if "--gpus" in words else "1"
        least = ["--dtype", "bfloat16"] if "inference" in words else ["--effective-batch", gpus, "--amp", "bfloat16"]
        words += least
    if "all" in words:  # of eight processes, two
        words[words.index("--nproc-per-node") + 1] = "2"
    if "oom" in words:  # not every snapshot has an error
        words[1] = "oom.pickle"
    return words


def _by_day(commands: list[str]) -> list[str]:
    """Those of which each shows a command that none before it shows, or writes a capture that others read."""
    known: set[tuple[str, str]] = set()
    kept = []
    for command in commands:
        name, *words = shlex.split(command, comments=True)[1:]
        shown = {(name, name), *((name, word) for word in words if word.endswith(".memprof"))}
        if shown - known and not {*AT_NIGHT} & {*words}:
            kept.append(command)
            known |= shown
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["by day", pytest.param("at night", marks=pytest.mark.nightly)])
def test_every_command_of_the_documentation_runs(memprof, folder, monkeypatch, lane):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}", prepend=":")
    died = ("--model-size", "1M", "--context-length", 512, "--batch-size", 8, "--gpu-vram", 0.6)
    assert memprof("profile", *died, "--save", "oom.memprof").exit_code == 3
    assert memprof("export", "oom.memprof", "--to", "oom.pickle").exit_code == 0
    assert memprof("profile", "--model-size", "1M", "--context-length", 64, "--save", "run.memprof").exit_code == 0
    assert memprof("export", "run.memprof", "--to", "snapshot.pickle").exit_code == 0
    for name in ("before", "after", "simulated", "measured"):
        shutil.copy("run.memprof", f"{name}.memprof")
    shutil.copy("docs/doctor_example.log", "train.log")
    by_day = _by_day(COMMANDS)
    assert 20 < len(by_day) < len(COMMANDS)
    for command in by_day if lane == "by day" else COMMANDS:
        words = _small(command)
        # Engines are not installed: tests/unit/stubs/vllm and sglang.
        if {"vllm", "sglang", "sglang.launch_server", "offline.py", "grpo.py"} & {*words}:
            continue
        done = memprof(*words)
        # Two runs that differ are told by 4, a recording that ends in an error by 3, a machine without a GPU by 1; here
        # no assistant can be read: 2.
        no_gpu = 0 if "--" in words else 1
        code = {"compare": 4, "analyze": 3 if "oom" in words else 0, "monitor": no_gpu, "mcp": 2}.get(words[0], 0)
        assert done.exit_code in (0, code), (command, done.stderr)
        assert "Traceback" not in done.stderr, command
