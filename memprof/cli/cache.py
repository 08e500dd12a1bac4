"""`memprof cache`: list and remove cached results."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from memprof.cli.output import ListOptions, print_json
from memprof.cli.streams import echo
from memprof.units import format_bytes

EXAMPLES = """
memprof cache
memprof cache --clear
memprof cache --json
"""


def cache(
    output: ListOptions,
    clear: Annotated[bool, typer.Option("--clear", help="Remove them.")] = False,
) -> None:
    """Show what is kept of simulated runs: where, how much, and which questions were answered.

    What `memprof profile` and `memprof recommend` answered is kept where it depends on nothing but what was asked, what
    is installed and files that are looked at again; models that are code are run each time. MEMPROF_CACHE names another
    folder, or `off`.
    """
    from memprof.flows.cache.store import CACHE_VARIABLE, MAX_CACHE_BYTES, Store, get_cache_folder

    folder = get_cache_folder()
    store = None if folder is None else Store(folder)
    removed = store.clear() if clear and store is not None else 0
    contents = [] if store is None else [(entry, store.read(entry.path)) for entry in store.list_entries()]
    entries = [(entry, None if data is None else f"memprof {data.get('said', '')}") for entry, data in contents]
    total = sum(entry.num_bytes for entry, _ in entries)
    if output.as_json:
        from memprof.report.documents.command_results import CachedResult, CachedResultList

        results = tuple(CachedResult(name, entry.num_bytes, entry.last_used) for entry, name in entries if name)
        print_json(
            CachedResultList(
                folder=None if folder is None else str(folder),
                num_bytes=total,
                most_bytes=MAX_CACHE_BYTES,
                removed=removed,
                answers=results,
            )
        )
        return
    if store is None:
        echo(f"nothing is kept: {CACHE_VARIABLE} is off, or there is no home folder")
        return
    if clear:
        echo(f"{_format_count(removed)} removed from {folder}")
        return
    echo(f"{folder}: {_format_count(len(entries))}, {format_bytes(total)} of at most {format_bytes(MAX_CACHE_BYTES)}")
    for entry, command in entries:
        time_text = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        echo(f"  {time_text}  {format_bytes(entry.num_bytes):>10}  {command or 'damaged: not used'}")


def _format_count(count: int) -> str:
    return f"{count} answer" if count == 1 else f"{count} answers"
