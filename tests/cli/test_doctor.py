"""`memprof doctor`: text and JSON, standard input, usage error, and how fast it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 20.55 GiB is free. Including non-PyTorch memory, this process has 58.54 GiB memory in use. Of the "
    "allocated memory 57.36 GiB is allocated by PyTorch, and 533.40 MiB is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text("python train.py --model Qwen/Qwen3-4B\nstep 1\n" + OOM)
    return path


def test_text_names_cause_tensor_and_commands(memprof: Callable[..., Any], log: Path):
    done = memprof("doctor", log, "--batch-size", 1, "--context-length", 131072)
    assert done.exit_code == 0
    assert done.stdout.startswith("One tensor is too large: 37.09 GiB")
    assert "37.09 GiB = 1 x 131072 x 151936 x bfloat16: logits" in " ".join(done.stdout.split())
    assert "memprof profile --model qwen3-4b" in done.stdout
    assert "--fix chunked-loss" in done.stdout
    assert done.stderr == ""


def test_a_log_beyond_the_ceiling_is_named(memprof: Callable[..., Any], log: Path, monkeypatch: pytest.MonkeyPatch):
    def fill(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("memprof.doctor.diagnose_log", fill)
    done = memprof("doctor", log, "--max-memory", "4GiB")
    assert done.exit_code == 2 and f"value: {log} (over 4.00 GiB)" in done.stderr
    assert "value: standard input" in memprof("doctor", "-").stderr


def test_json(memprof: Callable[..., Any], log: Path):
    found = memprof("doctor", log, "--json", "--context-length", 131072, "--batch-size", 1).json["diagnoses"][0]
    assert found["cause"] == "large-tensor"
    assert found["figures"]["tried"]["text"] == "37.09 GiB"
    assert found["tensors"][0]["shape"] == [1, 131072, 151936]
    assert found["tensors"][0]["exact"]


@pytest.mark.slow
@pytest.mark.nightly
def test_env(memprof: Callable[..., Any]):
    done = memprof("doctor", "--env", "--json")
    found = done.json
    assert done.exit_code == 0 and next(iter(found["facts"])) == "torch"
    known, _, number = found["facts"]["private names of torch"].removesuffix(" are there").partition(" of ")
    assert 0 < int(known) <= int(number)
    assert not [check for check in found["findings"] if "memprof refuses it" in check["problem"]]


def test_a_text_without_an_error_is_no_verdict(memprof: Callable[..., Any], tmp_path: Path):
    (tmp_path / "sound.log").write_text("step 1, loss 0.5\n")
    done = memprof("doctor", tmp_path / "sound.log")
    assert (done.exit_code, done.stdout) == (1, "") and "no memory or device error is in it" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{log}/none",), "no such file"),
        (("{folder}",), "a folder"),
        (("{binary}",), "not a log"),
        (("{log}", "--model", "llama-9"), "unknown model"),
        (("{log}", "--env"), "--env looks at this machine"),
    ],
)
def test_wrong_use_says_so_and_exits_with_2(
    memprof: Callable[..., Any], log: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
):
    sound, binary = tmp_path / "sound.log", tmp_path / "snapshot.pickle"
    sound.write_text("all is well\n")
    binary.write_bytes(b"\x80\x04\x95" + bytes(100))
    places = {"log": log, "folder": tmp_path, "sound": sound, "binary": binary}
    done = memprof("doctor", *(argument.format(**places).replace(".log/none", ".none") for argument in arguments))
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_standard_input_without_torch():
    code = (
        "import sys\nfrom memprof.cli.main import run\n"
        "try:\n    run(['doctor'])\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'rich'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=OOM, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "logits" in done.stdout
