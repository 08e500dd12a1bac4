"""`memprof gpus`: the cards that can be simulated."""

from __future__ import annotations

import typer

from memprof.catalog import list_gpus
from memprof.units import gib


def gpus() -> None:
    """List the catalog's cards: name, capacity as CUDA reports it (GiB), compute capability."""
    for card in list_gpus():
        major, minor = card.compute_capability
        typer.echo(f"{card.key:<24}{gib(card.total_bytes):>8} GiB  sm_{major}{minor:<3} {card.name}")
