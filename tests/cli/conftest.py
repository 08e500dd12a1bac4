"""Run the command line inside this process: as the console script does, without paying for torch's import each time."""

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from memprof.cli.main import run

# As the console script has it (cli/main.py); here transformers may import them while a stream of pytest's is closed.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)


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
