"""The CUDA card that a run is measured on."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from memprof.device.context import CONTEXT_BYTES
from memprof.device.nvml import card_use
from memprof.errors import MemprofError, UsageError, first_line
from memprof.measured.events import Recorded

MAX_ENTRIES = 2_000_000
"""Of the allocator's history; a run that has more loses its beginning."""


class CudaCard(NamedTuple):
    """What CUDA says of the current card, in bytes."""

    name: str
    total_bytes: int
    usable_bytes: int
    """For torch's allocator: what is free, and what it holds already. Other processes have the rest."""
    context_bytes: int
    """Of this process outside the allocator. NVML says it; where it may not name processes, the usual size is taken."""


def cuda_card() -> CudaCard:
    """The current card.

    Raises:
        MemprofError: there is none, or CUDA cannot use it.
    """
    why = why_no_cuda()
    if why is not None:
        raise MemprofError("there is no CUDA card to measure on", value=why, hint="leave out --device cuda, or say cpu")
    try:
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        own = card_use(nvml_card()).own_bytes
        context = CONTEXT_BYTES if own is None else own - reserved
        usable = min(free + reserved, total)
        return CudaCard(name, total, usable, max(min(context, total - usable), 0))
    except RuntimeError as error:
        raise MemprofError(
            "the CUDA card cannot be used",
            value=first_line(error),
            hint="see with nvidia-smi whether it is in use or needs a reset",
        ) from None


def check_cards(number: int) -> None:
    """Whether this machine has so many cards. They are not used, so that processes may be forked that do.

    Raises:
        MemprofError: it has none that CUDA can use.
        UsageError: it has fewer.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    why = why_no_cuda()
    if why is not None:
        raise MemprofError("there is no CUDA card to measure on", value=why, hint="leave out --device cuda, or say cpu")
    if torch.cuda.device_count() < number:
        raise UsageError(
            f"{number} processes are to be measured on a card each", value=f"{torch.cuda.device_count()} are here",
            hint=f"leave out --device: on virtual cards there may be {number}",
        )  # fmt: skip


def use_card(number: int) -> None:
    """Make it this process's current card."""
    torch.cuda.set_device(number)


def nvml_card() -> int | str:
    """The current card as NVML knows it: CUDA's ordinal is NVML's index only where no card is hidden."""
    current = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
    return current if uuid is None else str(uuid)


def why_no_cuda() -> str | None:
    """Why this process has no CUDA card; None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no driver or no card"
    return None


def take_requested_sizes(recorded: Recorded, snapshot: dict[str, Any], device: int = 0) -> str | None:
    """Replace the blocks' sizes, which the profiler tells, by what was asked for, which the history tells.

    Returns:
        Why it could not be done, None if it was: the two did not see the same allocations.
    """
    asked = [entry for entry in snapshot["device_traces"][device] if entry["action"] == "alloc"]
    given = [allocation for allocation in recorded.allocations if allocation.device.startswith("cuda")]
    asked = asked[len(asked) - len(given) :]  # the history may have begun a little earlier
    if [entry["addr"] for entry in asked] != [allocation.address for allocation in given]:
        return (
            f"the profiler saw {len(given):,} allocations on the card and the allocator's history has {len(asked):,} "
            "others: sizes are those of blocks, rounded"
        )
    for entry, allocation in zip(asked, given, strict=True):
        allocation.num_bytes = entry["size"]
    return None
