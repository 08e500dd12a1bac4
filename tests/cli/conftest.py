"""Run the command line inside this process: as the console script does, without paying for torch's import each time."""

import gc
import json
import logging
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memprof.cli.main import run
from tests.schemas import checked

# As the console script has it (cli/main.py); here transformers may import them while a stream of pytest's is closed.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


TRAIN = """
import sys
import torch
from torch import nn

print("arguments", sys.argv[1:])
width, batch = int(sys.argv[1]), int(sys.argv[2])
model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(batch, 64, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item())
print("done")
"""


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """What was answered, which is as docs/schema says."""
        return checked(json.loads(self.stdout))


@pytest.fixture
def memprof(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`memprof("profile", "--model", "gpt2")` -> exit code, stdout and stderr."""

    def call(*arguments: object) -> Result:
        collects = gc.isenabled()
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as stopped:
                run([str(argument) for argument in arguments])
        finally:
            # The command switches collection off for the rest of its process.
            if collects:
                gc.enable()
        captured = capsys.readouterr()
        code = stopped.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a training script, or another, and gives its name; the test runs in its folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = TRAIN, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write
