"""Run a recipe as users do, and find what it says of a claim."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.processes import ROOT, python

PAGES = ROOT / "docs" / "case-studies"
LIMIT_SECONDS = 120
# `memprof recipes run ...`, in which a warning about a line of the recipe's audit is an error.
_STRICT = r"""
import runpy, sys, warnings
warnings.filterwarnings("error", category=UserWarning, module=r"audit\Z")
sys.argv[:1] = ["memprof", "recipes", "run"]
runpy.run_module("memprof", run_name="__main__")
"""


class Output(str):
    """What a recipe printed, without the line breaks of its paragraphs."""

    def claim(self, text: str) -> str:
        """The line on a claim that begins so."""
        (line,) = [line for line in self.splitlines() if line.startswith(f"* {text}")]
        return line


def _check_page(number: int, output: str, measured: str = "(?!)") -> None:
    """The page of a case study shows what its recipe prints, and its prose has no figure that the recipe does not.

    Args:
        number: of the case study.
        output: of its recipe.
        measured: matches lines whose figures are measured, or come of this machine's arithmetic: words alone count.

    Raises:
        AssertionError: it is out of date.
    """
    (page,) = PAGES.glob(f"{number}-*.md")
    text = page.read_text(encoding="utf-8")
    (shown,) = _BLOCK.findall(text)
    pairs = [[re.sub(r"\d[\d.,]*", "0", line) if re.search(measured, line) else line for line in lines.splitlines()]
             for lines in (_unwrapped(shown), output.strip("\n"))]  # fmt: skip
    assert [line.split() for line in pairs[0]] == [line.split() for line in pairs[1]], (
        f"{page.name} is out of date: run `make docs`"
    )
    prose = re.sub(r"<!-- slow output of: .*?<!-- end of output -->", "", _BLOCK.sub("", text), flags=re.DOTALL)
    for figure in _FIGURE.findall(" ".join(prose.split())):
        assert figure in " ".join(shown.split()), f"{page.name} says {figure}, which its recipe does not print"


_BLOCK = re.compile(r"<!-- output of: [^\n]*-->\n```text\n(.*?)\n```\n<!-- end of output -->", re.DOTALL)
_FIGURE = re.compile(r"\d[\d,.]*(?: of [\d,.]+| times)?(?:%| ?(?:[KMGT]i?B|bytes|s|seconds|times|positions)\b)")


def _unwrapped(printed: str) -> str:
    return re.sub(r"\n  (?=\S)", " ", printed)


def _run(name: str, *arguments: str) -> Output:
    done = python("-c", _STRICT, name, *arguments, folder=ROOT, seconds=8 * LIMIT_SECONDS)
    assert done.exit_code == 0, done.stderr
    assert not done.stderr
    # Two minutes on two idle cores; the wall clock of a machine that does other things too would say nothing.
    assert done.processor_seconds < 2 * LIMIT_SECONDS
    return Output(_unwrapped(done.stdout))


@pytest.fixture(scope="session")
def check_page() -> Callable[..., None]:
    """`check_page(1, output)`: see `_check_page`."""
    return _check_page


@pytest.fixture(scope="session")
def run() -> Callable[..., Output]:
    """`run("1", "--some-option")` -> what `memprof recipes run 1 --some-option` prints."""
    return _run
