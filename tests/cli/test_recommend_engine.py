"""`memprof recommend --engine`: text and JSON, exit codes, usage errors, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ASK = ("recommend", "--engine", "vllm", "--model", "qwen2.5-7b", "--gpu", "rtx-4090", "--context-length", 8192)


def test_text_has_the_answer_first(memprof: Callable[..., Any]) -> None:
    done = memprof(*ASK, "--concurrency", 8)
    assert done.exit_code == 0
    assert done.stdout.startswith("vllm 0.33.0 starts qwen2.5-7b on rtx-4090: ")
    assert "vllm serve Qwen/Qwen2.5-7B --max-model-len 8192" in done.stdout


def test_json_is_the_same_budget(memprof: Callable[..., Any]) -> None:
    document = json.loads(memprof(*ASK, "--json").stdout)
    budget = document["budget"]
    assert (document["command"], budget["engine"], budget["context_length"]) == ("recommend --engine", "vllm", 8192)
    assert budget["num_tokens"] > 100_000


def test_a_refusal_has_its_exit_code(memprof: Callable[..., Any]) -> None:
    done = memprof("recommend", "--engine", "vllm", "--model", "qwen3-32b", "--gpu", "rtx-4090", "--quiet")
    assert done.exit_code == 3 and "does not start" in done.stdout


def test_slots_of_adapters_take_memory(memprof: Callable[..., Any]) -> None:
    plain, with_slots = (
        json.loads(memprof(*ASK, *words, "--json").stdout)["budget"]
        for words in ((), ("--max-loras", 4, "--lora-rank", 64))
    )
    assert with_slots["weights_bytes"] > plain["weights_bytes"]
    assert "--enable-lora --max-loras 4 --max-lora-rank 64" in with_slots["command"]


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_other_engines(memprof: Callable[..., Any], engine: str) -> None:
    done = memprof(
        "recommend", "--engine", engine, "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--context-length", 4096
    )
    assert done.exit_code == 0 and done.stdout.startswith(engine)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--concurrency", 2), "--concurrency needs an engine"),
        (("--engine", "vllm"), "--engine needs a model"),
        (("--engine", "vllm", "--model", "gpt2", "--adapter", "lora"), "--adapter is not for an inference engine"),
        (("--engine", "vllm", "--model", "gpt2", "--gguf-type", "q8_0"), "--gguf-type is for llama.cpp"),
        (("--engine", "llama.cpp", "--model", "gpt2", "--gpus", 2), "for one GPU"),
        (("--engine", "llama.cpp", "--model", "gpt2", "--memory-utilization", 0.5), "is not for llama.cpp"),
        (("--engine", "llama.cpp", "--model", "gpt2", "--engine-release", "b1"), "is not for llama.cpp"),
        (("--engine", "llama.cpp", "--model", "gpt2", "--kv-cache-dtype", "nvfp4"), "llama.cpp has no such cache"),
        (("--engine", "sglang", "--model", "gpt2", "--max-loras", 2), "--max-loras is for vllm"),
        (("--engine", "vllm", "--model", "gpt2", "--lora-rank", 8), "--lora-rank needs slots here"),
        (("--engine", "vllm", "--model", "gpt2", "--dtype", "float32"), "--dtype is not for an inference engine"),
        (("--engine", "vllm", "--model", "gpt2", "--memory-utilization", 1.5), "not a fraction of the GPU"),
        (("--engine", "vllm", "--model", "no-such"), "unknown model"),
        (("--engine", "vllm", "--model", "falcon-7b"), "does not know this kind of model"),
        (("--engine", "vllm", "--model", "qwen2.5-7b", "--gpus", 3), "28 attention heads"),
    ],
)
def test_usage_errors(memprof: Callable[..., Any], words: tuple[object, ...], problem: str) -> None:
    done = memprof("recommend", *words)
    assert done.exit_code == 2 and problem in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_neither_torch_nor_rich_is_imported() -> None:
    program = (
        "import sys; from memprof.cli.main import run\n"
        "try: run(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'rich', 'pandas', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *map(str, ASK)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--amp", "bfloat16"), 2)])
def test_options_of_a_settings_file_that_are_for_training_are_no_mistake(
    memprof: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memprof.toml").write_text("" if words else 'amp = "bfloat16"\n', encoding="utf-8")
    done = memprof(*ASK, *words)
    assert done.exit_code == code and ("--amp is not for" in done.stderr) == bool(words)
