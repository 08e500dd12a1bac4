"""`memprof FILE` takes the command for the kind of the file, and `memprof` alone answers with the common questions."""

from __future__ import annotations

import gzip
import pickle
import shlex
from pathlib import Path

import pytest

from memprof.cli.guess import WELCOME, guess_command
from memprof.cli.main import COMMANDS
from memprof.errors import UsageError

CONTENTS = {
    "train.py": (b"print(1)", "run"),
    "oom.pickle": (pickle.dumps({"segments": []}), "analyze"),
    "oom.pickle.gz": (gzip.compress(pickle.dumps({"segments": []})), "analyze"),
    "run.memprof": (gzip.compress(b'{"schema": 1}'), "show"),
    "report.json": (b' {"schema": 3}', "show"),
    "error.log": (b"torch.OutOfMemoryError: CUDA out of memory.", "doctor"),
    "empty.log": (b"", None),
    "weights.bin": (b"\x00\x01\x02", None),
    "damaged.gz": (b"\x1f\x8b\x08damaged", None),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_kinds_of_files(name: str, tmp_path: Path) -> None:
    content, command = CONTENTS[name]
    (tmp_path / name).write_bytes(content)
    if command is None:
        with pytest.raises(UsageError, match="none that memprof reads"):
            guess_command(str(tmp_path / name))
    else:
        assert guess_command(str(tmp_path / name)) == command


def test_a_script_that_is_missing_is_no_unknown_command(memprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = memprof("nosuch.py")
    assert done.exit_code == 2 and "no such file" in done.stderr and "value: nosuch.py\n" in done.stderr


@pytest.mark.parametrize("name", ["profiel", "", "a\0b", "."])
def test_what_is_no_file(name: str) -> None:
    assert guess_command(name) is None


def test_a_file_alone_is_read(memprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("error.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    guessed, named = memprof("error.log"), memprof("doctor", "error.log")
    assert guessed.stdout == named.stdout and guessed.exit_code == named.exit_code
    assert guessed.stderr == "memprof: this is `memprof doctor error.log`\n"


def test_a_command_is_no_file(memprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpus").write_text("text")
    assert not memprof("gpus").stderr


def test_welcome_names_commands_that_exist(memprof):
    done = memprof()
    assert (done.exit_code, done.stdout) == (0, WELCOME + "\n")
    assert max(map(len, WELCOME.splitlines())) <= 110
    commands = [line.partition("  memprof ")[2] for line in WELCOME.splitlines() if "?  " in line]
    assert commands and all(shlex.split(command)[0] in COMMANDS for command in commands)
