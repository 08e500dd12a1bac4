"""The pictures of the documentation, made by the program itself: `python -m docs.pictures`, a part of `make docs`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.browser import Browser, find_browser

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("profile", "--model-size", "4B", "--context-length", "131072", "--quiet")


def main() -> None:
    """Write docs/html.png, where there is a browser."""
    try:
        find_browser()
    except pytest.skip.Exception as reason:
        print(f"no pictures are made: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "memprof", *COMMAND, "--html", page],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        browser = Browser()
        try:
            browser.open(page, width=1000, height=1240)
            browser.wait("document.querySelectorAll('#holders .slice').length > 20")
            browser.picture(ROOT / "docs" / "html.png", whole=False)
        finally:
            browser.close()
    print("wrote docs/html.png")


if __name__ == "__main__":
    main()
