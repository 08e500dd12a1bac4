"""Every option of every command, from the parser's own table, with two values that nobody should give."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from memprof.cli.main import app
from tests.adversarial.documents import TINY, write_capture
from tests.adversarial.harmless import LEAN, assert_harmless, run, untouched
from tests.lanes import of_lane

VALUES = (
    "", "0", "-1", "nan", "1e400", "99999999999", "9" * 5000, "x" * 300, "\x1b]0;t\x07\u202e[/x]", "1,2,,-3",
)  # fmt: skip
SCRIPT = """
import torch
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# What makes each command a whole one: options before and arguments after.
GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "profile": (("--model", "tiny.json", "--context-length", "8"), ()),
    "run": ((), ("script.py",)),
    "estimate": (("--params", "1M"), ()),
    "recommend": (("--gpu-vram", "1"), ()),
    "sweep": (("--model", "tiny.json", "--context-length", "8"), ()),
    "show": ((), ("run.memprof",)),
    "analyze": ((), ("run.memprof",)),
    "compare": ((), ("run.memprof", "run.memprof")),
    "export": (("--to", "new.json"), ("run.memprof",)),
    "doctor": ((), ("log.txt",)),
    "models": ((), ()),
    "gpus": ((), ()),
    "verify": ((), ("chunked-loss",)),
    "vocab": ((), ("corpus.txt",)),
    "monitor": (("--quiet",), ("--", "true")),
}
TORCH = ("profile", "run", "recommend", "sweep", "verify")
EACH = 2  # Values of an option: what reads them is shared by many options, which are given all ten.


def _drawn(case: tuple[str, str, str]) -> int:
    """Give a case its place in a shuffled order that is the same in every run."""
    return zlib.crc32(repr(case).encode())


def _cases() -> list[Any]:
    group: Any = typer.main.get_command(app)
    cases = []
    for name in GIVEN:
        for parameter in group.commands[name].params:
            if parameter.param_type_name == "option" and not parameter.is_flag:
                options = [(name, parameter.opts[-1], value) for value in VALUES]
                cases += sorted(options, key=_drawn)[:EACH]
    # One in twenty in every run.
    often = [_drawn(case) % 20 == 0 for case in cases]
    return [
        pytest.param(*case, marks=() if here else pytest.mark.nightly, id=f"{case[0]}{case[1]}={case[2][:12]!a}")
        for case, here in zip(cases, often, strict=True)
    ]


INPUTS = {"values of every option": len(_cases())}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "flag", "value"), of_lane(_cases()))
def test_a_value(tmp_path: Path, command: str, flag: str, value: str) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "log.txt").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (tmp_path / "corpus.txt").write_text("a b c a\n" * 9)
    write_capture(tmp_path / "run.memprof")
    before = untouched(tmp_path)
    options, arguments = GIVEN[command]
    if flag in options:
        at = options.index(flag)
        options = options[:at] + options[at + 2 :]
    done = run(
        command, *options, f"{flag}={value}" if flag.startswith("--") else flag, *arguments, folder=tmp_path,
        libraries=() if command in TORCH else LEAN,
    )  # fmt: skip
    assert_harmless(done)
    after = untouched(tmp_path)
    assert {name: after.get(name) for name in before} == before
