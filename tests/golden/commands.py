"""What commands answer in JSON: run, and made comparable.

    python -m tests.golden.commands            # writes tests/golden/unchanged/*.json anew

A command whose totals are to be others from now on has its file written anew, in the commit that says why.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE / "unchanged"
_OF_A_MACHINE = ("compile_seconds", "compiled_kernels")
PROGRAM = KEPT / "program.py"

_TINY = "--model gpt2 --context-length 64 --batch-size 2"
# Name of a file -> commands, of which the last one's answer is kept.
COMMANDS: dict[str, tuple[str, ...]] = {
    "profile": (f"profile {_TINY} --json",),
    "profile-lora": (
        "profile --model pythia-70m --context-length 96 --adapter lora --dtype bfloat16 --gradient-accumulation 2 "
        "--activation-checkpointing --json",
    ),
    "profile-generates": ("profile --model gpt2 --context-length 32 --mode inference --new-tokens 4 --json",),
    "profile-does-not-fit": ("profile --model llama-3.1-8b --context-length 512 --gpu rtx-4090 --json",),
    "profile-fix": (f"profile {_TINY} --vocab-size 30000 --fix chunked-loss,fused-optimizer --json",),
    "profile-ladder": ("profile --model gpt2 --context-length 256 --batch-size 4 --gpu-vram 2.5 --ladder --json",),
    "run": ("run --steps 3 --json program.py",),
    "run-until-exit": ("run --until-exit --json program.py",),
    "analyze": (f"profile {_TINY} --save a.memprof --json", "analyze a.memprof --json"),
    "compare": (
        f"profile {_TINY} --save a.memprof --json",
        f"profile {_TINY} --fix chunked-loss --steps 3 --save b.memprof --json",
        "compare a.memprof b.memprof --json",
    ),
    "estimate": ("estimate --model llama-3.1-8b --context-length 4096 --json",),
}


def run_alone(arguments: list[str], folder: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python ARGUMENTS`, in a new process with the checkout to be asked."""
    path = os.pathsep.join(filter(None, (_checkout(), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "MEMPROF_CACHE": "off"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def answer(name: str, run: Callable[[list[str], str], tuple[int, str, str]] = run_alone) -> object:
    """What the last command of `name` says, without what differs from machine to machine."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(PROGRAM, folder)
        for command in COMMANDS[name]:
            exit_code, stdout, stderr = run(["-m", "memprof", *command.split()], folder)
            if exit_code not in (0, 1, 3, 4):
                raise RuntimeError(f"{command}: {stderr}")
        return comparable(json.loads(stdout), folder)


def _checkout() -> str:
    return os.environ.get("MEMPROF_CHECKOUT", str(HERE.parents[1]))


def comparable(document: object, folder: str) -> object:
    """Without paths of this machine, versions of memprof, and lines and functions of its own files."""
    if isinstance(document, dict):
        kept = {key: comparable(value, folder) for key, value in document.items() if key != "memprof_version"}
        return {key: None if key in _OF_A_MACHINE else value for key, value in kept.items()}
    if isinstance(document, list):
        values = [comparable(value, folder) for value in document]
        if all(isinstance(value, dict) and "key" in value for value in values):  # equal ones stand in order of paths
            values.sort(key=lambda value: json.dumps(value, sort_keys=True))
        return values
    if isinstance(document, str):
        text = document.replace(os.path.realpath(folder), "FOLDER").replace(folder, "FOLDER")
        text = re.sub(
            r"that took [\d.]+ s on this machine; how long making its \d+", "that took SECONDS, its NUMBER", text
        )
        text = re.sub(r"/[^ ]*/(site-packages|memprof|lib/python3\.\d+)/", r"\1/", text)
        return re.sub(r"((?:memprof/[\w/]+|\bworkload/\w+)\.py):\d+(?: [\w.<>]+)?", r"\1:LINE", text)
    return document


def write(name: str, document: object) -> None:
    """Write the file of command `name` anew."""
    (KEPT / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        write(name, answer(name))


if __name__ == "__main__":
    main()
