"""The CUDA card that a run is measured on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memprof.errors import MemprofError
from memprof.measured.events import Recorded

MAX_ENTRIES = 2_000_000
"""Of the allocator's history; a run that has more loses its beginning."""


class CudaCard(NamedTuple):
    """What CUDA says of the current card, in bytes."""

    name: str
    total_bytes: int
    context_bytes: int
    """Used by this process and others, and not held by torch's allocator."""


def cuda_card() -> CudaCard:
    """The current card.

    Raises:
        MemprofError: there is none, or CUDA cannot use it.
    """
    why = why_no_cuda()
    if why is not None:
        raise MemprofError("there is no CUDA card to measure on", value=why, hint="leave out --device cuda, or say cpu")
    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info()
        return CudaCard(properties.name, total, max(total - free - torch.cuda.memory_reserved(), 0))
    except RuntimeError as error:
        raise MemprofError(
            "the CUDA card cannot be used",
            value=str(error).strip().splitlines()[0],
            hint="see with nvidia-smi whether it is in use or needs a reset",
        ) from None


def why_no_cuda() -> str | None:
    """Why this process has no CUDA card; None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no driver or no card"
    return None


def start_history() -> None:
    """Have the allocator keep what it is asked for, without stacks: they are what costs time."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MAX_ENTRIES)


def stop_history() -> dict[str, Any]:
    """The allocator's snapshot with its history, which it keeps no longer."""
    torch.cuda.synchronize()
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot


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
