"""`memprof gpus`: the cards that can be simulated, and those that are here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memprof.cli.output import Listed, print_json
from memprof.cli.streams import say
from memprof.errors import UsageError
from memprof.units import gib

if TYPE_CHECKING:
    from memprof.catalog import Gpu
    from memprof.device.cards import NvmlCard, Reading
    from memprof.device.environment import Environment

EXAMPLES = """
memprof gpus
memprof gpus --present
memprof gpus --json
"""


def gpus(
    output: Listed,
    present: Annotated[
        bool, typer.Option("--present", help="Instead the cards of this machine, and which of the catalog they are.")
    ] = False,
) -> None:
    """List the catalog's cards: name, capacity as CUDA reports it (GiB), compute capability."""
    if present:
        from memprof.device.environment import read_environment
        from memprof.device.nvml import read_cards

        reading = read_cards()
        environment = read_environment(reading)
        if output.as_json:
            from memprof.report.documents.answers import PresentCards

            names = tuple(found.key if (found := _found(card)) else None for card in reading.cards)
            print_json(PresentCards.of(reading, names, environment))
        else:
            _say_present(reading, environment)
        return
    from memprof.catalog import list_gpus

    if output.as_json:
        from memprof.report.documents.answers import GpuList

        print_json(GpuList(gpus=tuple(list_gpus())))
        return
    for card in list_gpus():
        major, minor = card.compute_capability
        say(f"{card.key:<24}{gib(card.total_bytes):>8} GiB  sm_{major}{minor:<3} {card.name}")


def _say_present(reading: Reading, environment: Environment) -> None:
    """Say what NVML sees: the GPU's capacity as CUDA reports it (without what the driver keeps), and what is used."""
    if reading.cards:
        cuda = f", CUDA {reading.cuda_version} at most" if reading.cuda_version else ""
        torch = f"; torch {environment.torch_version}" if environment.torch_version else ""
        say(f"driver {environment.driver_version or 'not known'}{cuda}{torch}")
    for note in reading.notes:
        say(note)
    for card in reading.cards:
        say(f"{card.index}  {card.name}: {_memory(card)}; {_catalog(card)}")
        for piece in card.slices:
            size = "memory not known" if piece.total_bytes is None else f"{gib(piece.total_bytes)} GiB"
            option = "" if piece.total_bytes is None else f"; --gpu-vram {gib(piece.total_bytes)}"
            say(f"   slice {piece.index}  {piece.name}: {size}{option}")
        for note in card.notes:
            say(f"   {note}")
    for note in environment.notes:
        say(note)


def _memory(card: NvmlCard) -> str:
    if card.usable_bytes is None or card.used_bytes is None:
        return "memory not known"
    return f"{gib(card.usable_bytes)} GiB, {gib(card.used_bytes)} used"


def _found(card: NvmlCard) -> Gpu | None:
    from memprof.catalog import find_gpu

    try:
        return find_gpu(card.name)
    except UsageError:
        return None


def _catalog(card: NvmlCard) -> str:
    found, total = _found(card), card.usable_bytes
    if found is None:
        return "not in the catalog" + ("" if total is None else f": --gpu-vram {gib(total)} has its size")
    return f"--gpu {found.key} ({gib(found.total_bytes)} GiB)"
