"""The CUDA card that a run is measured on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.device.context import CONTEXT_BYTES
from memprof.device.nvml import card_use
from memprof.errors import MemprofError, UsageError, first_line
from memprof.measured.history import Difference, History
from memprof.patching.patch_set import Patch
from memprof.torch_private import cuda
from memprof.units import format_bytes

MAX_ENTRIES = 2_000_000
"""Of the allocator's history; a run that has more loses its beginning."""
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask the driver's library whether there is a GPU, in place of CUDA."""


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
    """Return why this process has no CUDA GPU, None if it has one. CUDA does not begin: the process may be forked."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no driver or no card"
    finally:
        del os.environ[_ASK_NVML]
        os.environ.update({} if before is None else {_ASK_NVML: before})


def check_allocator() -> None:
    """Raise MemprofError if torch's own caching allocator is not what serves the GPU."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise MemprofError(
            "memory of this allocator cannot be measured: it keeps no history of what it did", value=backend,
            hint="take backend:... out of PYTORCH_CUDA_ALLOC_CONF, or simulate: leave out --device",
        )  # fmt: skip


def history_goes_on(original: Callable[..., None]) -> Iterator[Patch]:
    """Let a program record the allocator's history too, for which there is one switch: memprof's own goes on."""

    @functools.wraps(original)
    def record(enabled: Any = "all", *args: Any, **options: Any) -> None:
        if enabled is True:  # the call of torch 2.0, with options of its own
            enabled, args, options = "all", (), {}
        if enabled:
            options.pop("clear_history", None)
            original(enabled, *args[:2], **{**options, "max_entries": MAX_ENTRIES})  # the third is max_entries

    yield cuda.record_memory_history.patch(record)


def why_incomplete(
    history: History, difference: Difference | None, missing: int, max_entries: int = MAX_ENTRIES
) -> MemprofError | None:
    """Return why what was recorded is no account of the GPU's memory; None if it is one.

    Args:
        history: of the run.
        difference: between the history and torch's counters.
        missing: bytes that the snapshot of the end has and the history has not, or the other way round.
        max_entries: that the allocator keeps.
    """
    if history.num_entries >= max_entries:
        return MemprofError(
            "the run allocated and freed more often than torch's allocator can remember",
            value=f"{max_entries:,} entries", hint="measure fewer steps, or simulate: leave out --device",
        )  # fmt: skip
    if difference is not None:
        counted, recorded = difference.counted_bytes, difference.recorded_bytes
        says = f"the counters say {format_bytes(counted)}, what was recorded adds up to {format_bytes(recorded)}"
    elif missing:
        says = f"the allocator's blocks at the end and what was recorded differ by {format_bytes(missing)}"
    elif history.unmatched:
        says = f"{history.unmatched:,} allocations and frees that the profiler saw"
    else:
        return None
    return MemprofError(
        "not all that the run did to the GPU's memory was recorded", value=says,
        hint="simulate: leave out --device; and please report this, with the program",
    )  # fmt: skip
