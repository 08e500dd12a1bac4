"""What vLLM imports: the page and the check of an installation name the same packages."""

from __future__ import annotations

from pathlib import Path

from memprof.serving.packages import VLLM_PACKAGES, make_install_command

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def test_the_page_has_every_package():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    words = {word.partition("==")[0] for line in lines for word in line.split()}
    assert set(VLLM_PACKAGES) <= words


def test_the_command_installs_what_is_missing_alone():
    assert make_install_command(("xgrammar",)) == "pip install --no-deps xgrammar"
    assert make_install_command().startswith("pip install aiohttp ")
