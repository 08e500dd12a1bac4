"""What a command leaves behind when its process ends."""

import subprocess
import sys

import pytest

LEFT = """
import gc
import sys
from memprof.cli.main import run

class Left(metaclass=type("nb_meta", (type,), {{"__module__": "{module}"}})):
    def __del__(self):
        print("let go")

gc.disable()
left = Left()
left.itself = left
sys.argv = ["memprof", "--version"]
del Left, left
run()
"""


@pytest.mark.parametrize(("module", "let_go"), [("nanobind", True), ("another", False)])
def test_circles_of_nanobind_are_let_go(module, let_go):
    """What is frozen stays, and nanobind's modules write to stderr about each such object of theirs."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT.format(module=module)], capture_output=True, text=True, check=True
    )
    assert ("let go" in done.stdout, done.stderr) == (let_go, "")
