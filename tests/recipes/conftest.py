"""Run a recipe as users do, and find what it says of a claim."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.processes import ROOT, python

PAGES = ROOT / "docs" / "case-studies"
LIMIT_SECONDS = 120
_STRICT = r"""
import runpy, sys, warnings
warnings.filterwarnings("error", category=UserWarning, module=r"audit\Z")
sys.argv[:1] = ["memprof", "recipes", "run"]
runpy.run_module("memprof", run_name="__main__")
"""
"""`memprof recipes run ...`, in which a warning about a line of the recipe's audit is an error."""


class Output(str):
    """What a recipe printed, without the line breaks of its paragraphs."""

    def claim(self, text: str) -> str:
        """The line on a claim that begins so."""
        (line,) = [line for line in self.splitlines() if line.startswith(f"* {text}")]
        return line


def _check_page(number: int, output: str) -> None:
    """The page of a case study shows what its recipe prints, but for numbers: some are of this machine's arithmetic.

    Raises:
        AssertionError: it is out of date.
    """
    (page,) = PAGES.glob(f"{number}-*.md")
    block = r"<!-- output of: [^\n]*-->\n```text\n(.*?)\n```\n<!-- end of output -->"
    (shown,) = re.findall(block, page.read_text(encoding="utf-8"), re.DOTALL)
    assert _words(shown) == _words(output), f"{page.name} is out of date: run `make docs`"


def _words(text: str) -> list[str]:
    return re.sub(r"[\d.,]+", "0", text).split()


def _run(name: str, *arguments: str) -> Output:
    done = python("-c", _STRICT, name, *arguments, folder=ROOT, seconds=8 * LIMIT_SECONDS)
    assert done.exit_code == 0, done.stderr
    assert not done.stderr
    # Two minutes on two idle cores; the wall clock of a machine that does other things too would say nothing.
    assert done.processor_seconds < 2 * LIMIT_SECONDS
    return Output(re.sub(r"\n  (?=\S)", " ", done.stdout))


@pytest.fixture(scope="session")
def check_page() -> Callable[[int, str], None]:
    """`check_page(1, output)`: see `_check_page`."""
    return _check_page


@pytest.fixture(scope="session")
def run() -> Callable[..., Output]:
    """`run("1", "--some-option")` -> what `memprof recipes run 1 --some-option` prints."""
    return _run
