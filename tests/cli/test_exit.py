"""What a command leaves behind when its process ends."""

import subprocess
import sys

import pytest

LEFT = """
import gc
import sys
from memprof.cli.main import run
from memprof.cli.progress import show_progress

class Left(metaclass=type("nb_meta", (type,), {{"__module__": "{module}"}})):
    def __del__(self):
        print("let go")

gc.disable()
left = Left()
left.itself = left
if {is_long}:
    show_progress(quiet=True)
sys.argv = ["memprof", "--version"]
del Left, left
run()
"""


@pytest.mark.parametrize(
    ("is_long", "module", "let_go"),
    [
        (False, "another", True),
        (True, "another", False),
        (True, "nanobind", True),
    ],
)
def test_garbage_is_left_where_much_was_made(is_long, module, let_go):
    code = LEFT.format(module=module, is_long=is_long)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("let go" in done.stdout, done.stderr) == (let_go, "")
