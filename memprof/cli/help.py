"""`memprof help [TOPIC]`: the pages of the documentation, also where only a wheel is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.streams import say
from memprof.errors import MemprofError, unknown_name

EXAMPLES = """
memprof help
memprof help lengths
memprof help run
"""
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "_docs", _PACKAGE.parent / "docs")
"""In an installed wheel; in a checkout."""


def help(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(help="A page's name. [default: list them]", metavar="TOPIC")] = None,
) -> None:
    """Show a page of the documentation: lengths, remedies, limitations and others."""
    pages = {page.stem: page for folder in _FOLDERS for page in sorted(folder.glob("*.md"))}
    if not pages:
        raise MemprofError("this installation has no pages", hint="install memprof from its wheel, or from a checkout")
    if topic is not None:
        if topic not in pages:
            raise unknown_name("topic", topic, pages, see="(memprof help lists them)")
        say(pages[topic].read_text(encoding="utf-8"), nl=False)
        return
    for name, page in pages.items():
        with page.open(encoding="utf-8") as lines:
            title = next((line for line in lines if line.startswith("#")), "")
        say(f"{name:<20} {title.lstrip('#').strip().replace('`', '')}")
