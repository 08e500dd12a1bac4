"""`memprof mcp`: a server of the Model Context Protocol, through which an assistant asks memprof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.options import FILES_PANEL
from memprof.errors import UsageError

EXAMPLES = """
memprof mcp
memprof mcp --root ~/models --root ~/train
"""


def mcp(
    root: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder whose files may be read and run; once for each.",
            metavar="FOLDER",
            show_default="the current folder",
            rich_help_panel=FILES_PANEL,
        ),
    ] = None,
) -> None:
    """Answer an assistant's questions over stdin and stdout, by the Model Context Protocol.

    Its tools are commands of memprof, and its results their JSON. torch is imported once; each question is answered in
    a process of its own.
    """  # fmt: skip
    from memprof.fixes.catalog import check_package

    check_package("memprof mcp", "mcp")
    roots = root or [Path.cwd()]
    for folder in roots:
        if not folder.is_dir():
            raise UsageError("--root is no folder", value=str(folder), hint="name a folder that exists")
    if sys.stdin is None or not sys.stdin.readable():
        raise UsageError("stdin cannot be read", value="memprof mcp", hint="let an assistant start it")
    from memprof.cli.mcp_server import serve

    serve(tuple(folder.resolve() for folder in roots))
