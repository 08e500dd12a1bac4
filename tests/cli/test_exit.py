"""What a command leaves behind when its process ends."""

import subprocess
import sys

import pytest

MODEL = """
import torch

def build():
    return torch.nn.Linear(16, 16)

def example_inputs(*args, **kwargs):
    return {"input": torch.randn(8, 16)}
"""
GOES = """
import os
from memprof.cli.main import run

class Goes:
    def __del__(self, write=os.write):
        write(2, b"let go")

goes = Goes()
run()
"""

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


ENDS = """
import atexit, sys
from memprof.cli.exits import end_at_once, nothing_is_to_be_let_go

class Left:
    def __del__(self):
        print("let go")

left = Left()
atexit.register(print, "first")
if "known" in sys.argv:
    nothing_is_to_be_let_go()
sys.stdout.write("answer, ")
atexit.register(print, "second")
end_at_once(3)
if "more" in sys.argv:
    atexit.register(print, "third")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["known"], "second first"),
        ([], "second first let go"),
        (["known", "more"], "third second first let go"),  # somebody has still something to do
    ],
)
def test_nothing_but_objects_is_lost_where_a_process_ends_at_once(words, said):
    """What was written and what was to be done at the end is, once, in the usual order."""
    done = subprocess.run([sys.executable, "-c", ENDS, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, " ".join(done.stdout.split()), done.stderr) == (3, f"answer, {said}", "")


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_program_of_the_user_is_let_go_of(own, tmp_path):
    """A profile of a known model ends at once; one of the user's may have something to do then."""
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    words = [
        "profile",
        "--no-cache",
        "--quiet",
        "--model",
        f"{model}:build" if own else "gpt2",
        "--context-length",
        "8",
    ]
    done = subprocess.run([sys.executable, "-c", GOES, *words], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Fits")
    assert done.stderr == ("let go" if own else "")
