"""`memprof help [TOPIC]`: the pages of the documentation, from a checkout or an installed wheel."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.output import ListOptions, print_json
from memprof.cli.streams import echo
from memprof.errors import MemprofError, unknown_name

EXAMPLES = """
memprof help
memprof help lengths
memprof help run
"""
_PACKAGE = resources.files("memprof")
# Folders of the documentation: in an installed wheel (or zip file), and in a checkout.
DOCS_FOLDERS = (_PACKAGE / "_docs", Path(str(_PACKAGE)).parent / "docs")


def help(
    output: ListOptions,
    topic: Annotated[
        str | None, typer.Argument(help="A page's name.", show_default="list them", metavar="TOPIC")
    ] = None,
) -> None:
    """Show a page of the documentation: lengths, fixes, limitations and others."""
    files = [
        file for folder in DOCS_FOLDERS if folder.is_dir() for file in folder.iterdir() if file.name.endswith(".md")
    ]
    pages = dict(sorted((file.name.removesuffix(".md"), file) for file in files))
    if not pages:
        raise MemprofError("this installation has no pages", hint="install memprof from its wheel, or from a checkout")
    if topic is not None and topic not in pages:
        raise unknown_name("topic", topic, pages, see="(memprof help lists them)")
    topics = pages if topic is None else {topic: pages[topic]}
    text = None if topic is None else pages[topic].read_text(encoding="utf-8")
    if output.as_json:
        from memprof.report.documents.command_results import Topic, TopicList

        print_json(TopicList(topics=tuple(Topic(name, read_title(page)) for name, page in topics.items()), text=text))
    elif text is not None:
        echo(text, nl=False)
    else:
        for name, page in topics.items():
            echo(f"{name:<20} {read_title(page)}")


def read_title(page: Traversable) -> str:
    """Return the first heading of a Markdown file, without `#` and backticks."""
    with page.open(encoding="utf-8") as lines:
        title = next((line for line in lines if line.startswith("#")), "")
    return title.lstrip("#").strip().replace("`", "")
