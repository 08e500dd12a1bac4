"""Fix expandable-segments: the setting of torch's caching allocator, in this process."""

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
    """Switch expandable segments on; memory that is reserved already stays in its segments.

    torch takes a string with all settings, and resets settings that the string omits; so the string repeats the current
    settings. Raises UsageError: the setting is on already, torch has no CUDA device, or torch rejects the setting.
    """
    # Older releases of torch know the first variable only; the second is the general name in newer releases.
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
    edited = ",".join([*(part for part in parts if not part.startswith(_KEY)), EXPANDABLE_SEGMENTS])
    restored = before if any(part.startswith(_KEY) for part in parts) else ",".join([*parts, _KEY + "False"])
    # torch's function, looked up now: a virtual GPU replaces it. The second name is older than torch 2.10, and
    # deprecated since.
    set_in_torch = cuda.accelerator_set_allocator_settings.get(None) or cuda.set_allocator_settings.get()

    def set_settings(text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            set_in_torch(text)

    changes.on_undo(lambda: set_settings(restored))
    try:
        set_settings(edited)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "torch refuses the allocator's settings",
            value=f"{edited}: {first_line(error)}",
            hint=f"before the program starts: {line}",
        ) from None
    changes.note(f"allocator settings: {edited}")


def current_settings() -> str:
    """Return the settings in force, as text: set last in the process, else by environment variable; "" for none."""
    get = cuda.accelerator_get_allocator_settings.get(None)
    if get is not None:
        with contextlib.suppress(RuntimeError):
            return str(get())
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def split_settings(text: str) -> list[str]:
    """Return the settings in a string such as "a:1,b:[c:2,d:3]"; commas in brackets belong to a value."""
    return re.findall(r"(?:\[[^\]]*\]|[^,])+", text.replace(" ", ""))
