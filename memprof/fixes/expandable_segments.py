"""expandable-segments: the setting of torch's caching allocator, in this process."""

from __future__ import annotations

import contextlib
import os
import re
import warnings

import torch
from torch import nn

from memprof.allocator.config import VARIABLES
from memprof.errors import UsageError, first_line
from memprof.fixes.applied import Changes
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS
from memprof.fixes.catalog.fix import EVERY_TIER, Fix, Numerics
from memprof.torch_private import cuda

_KEY = "expandable_segments:"


@Fix(
    name="expandable-segments", order=10, numerics=Numerics.EXACT, saves=("fragmentation",),
    changes="the caching allocator grows its segments in place instead of asking for others",
    cost="none to speak of; for the whole process, and what is on the GPU already stays where it is",
    alloc_conf="expandable_segments:True",
    ladder=20, outside=30, search=40, tiers=EVERY_TIER, helps={"fragmentation": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Set it; what is on the GPU already stays in the segments that it has.

    torch takes a string with all settings, and one that it does not name falls back to its default, so that those that
    are in force are named again. Raises UsageError: it is on already, torch has no CUDA here, or refuses the setting.
    """
    # Older releases know one variable; the other is the general name of newer ones.
    line = f"export {VARIABLES[0]}={EXPANDABLE_SEGMENTS}"
    if not torch.cuda.is_available():
        hint = f"where it has one, before the program starts: {line}"
        raise changes.does_not_apply("torch has no CUDA device here", f"torch {torch.__version__}", hint)
    before = current_settings()
    parts = split_settings(before)
    if any(part.replace(" ", "").lower() == EXPANDABLE_SEGMENTS.lower() for part in parts):
        raise changes.already_on(before)
    if any(part.startswith("backend:") and part != "backend:native" for part in parts):
        raise changes.does_not_apply("the allocator is not torch's own", before, "backend:native")
    wanted = ",".join([*(part for part in parts if not part.startswith(_KEY)), EXPANDABLE_SEGMENTS])
    back = before if any(part.startswith(_KEY) for part in parts) else ",".join([*parts, _KEY + "False"])
    # torch's own function, as it is now: on a virtual GPU, that one's. Its name before torch 2.10, and with a warning
    # since, is the second.
    own = cuda.accelerator_set_allocator_settings.get(None) or cuda.set_allocator_settings.get()

    def set_settings(text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            own(text)

    changes.on_undo(lambda: set_settings(back))
    try:
        set_settings(wanted)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "torch refuses the allocator's settings",
            value=f"{wanted}: {first_line(error)}",
            hint=f"before the program starts: {line}",
        ) from None
    changes.note(f"allocator settings: {wanted}")


def current_settings() -> str:
    """Return the settings in force, as text: those last set in the process, else the environment's; empty for none."""
    get = cuda.accelerator_get_allocator_settings.get(None)
    if get is not None:
        with contextlib.suppress(RuntimeError):
            return str(get())
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def split_settings(text: str) -> list[str]:
    """Split a string of settings, such as "a:1,b:[c:2,d:3]": commas in brackets belong to a value."""
    return re.findall(r"(?:\[[^\]]*\]|[^,])+", text.replace(" ", ""))
