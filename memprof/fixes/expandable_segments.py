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
from memprof.fixes.catalog.fix import ALL_TIERS, Fix, Numerics
from memprof.torch_private import cuda

_KEY = "expandable_segments:"


@Fix(
    name="expandable-segments", order=10, numerics=Numerics.EXACT, saves=("fragmentation",),
    changes="let the caching allocator grow its segments in place instead of reserving new ones",
    cost="none to speak of; for the whole process, and what is on the GPU already stays where it is",
    alloc_conf="expandable_segments:True",
    ladder_order=20, script_order=30, search_order=40, headroom_order=10, tiers=ALL_TIERS,
    helps={"fragmentation": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Switch expandable segments on for new segments of the caching allocator.

    torch resets settings that the new string omits, so the string repeats the current ones. Raises UsageError if the
    setting is on already, torch has no CUDA device, or torch rejects the setting.
    """
    # Older releases of torch know the first variable only; the second is the general name in newer releases.
    export_command = f"export {VARIABLES[0]}={EXPANDABLE_SEGMENTS}"
    if not torch.cuda.is_available():
        hint = f"where it has one, before the program starts: {export_command}"
        raise changes.does_not_apply("torch has no CUDA device here", f"torch {torch.__version__}", hint)
    current = get_settings()
    settings = split_settings(current)
    if any(item.replace(" ", "").lower() == EXPANDABLE_SEGMENTS.lower() for item in settings):
        raise changes.already_on(current)
    if any(item.startswith("backend:") and item != "backend:native" for item in settings):
        raise changes.does_not_apply("the allocator is not torch's own", current, "backend:native")
    new_settings = ",".join([*(item for item in settings if not item.startswith(_KEY)), EXPANDABLE_SEGMENTS])
    undone = current if any(item.startswith(_KEY) for item in settings) else ",".join([*settings, _KEY + "False"])
    # torch's function, looked up now: a virtual GPU replaces it. The second name is older than torch 2.10, and
    # deprecated since.
    torch_setter = cuda.accelerator_set_allocator_settings.get(None) or cuda.set_allocator_settings.get()

    def set_settings(text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch_setter(text)

    changes.on_undo(lambda: set_settings(undone))
    try:
        set_settings(new_settings)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "torch refuses the allocator's settings",
            value=f"{new_settings}: {first_line(error)}",
            hint=f"before the program starts: {export_command}",
        ) from None
    changes.note(f"allocator settings: {new_settings}")


def get_settings() -> str:
    """Return the allocator's current settings as a string: torch's, or else the environment variable's, or ""."""
    torch_getter = cuda.accelerator_get_allocator_settings.get(None)
    if torch_getter is not None:
        with contextlib.suppress(RuntimeError):
            return str(torch_getter())
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def split_settings(text: str) -> list[str]:
    """Return the comma-separated settings in `text`, such as "a:1,b:[c:2,d:3]"; commas in brackets do not separate."""
    return re.findall(r"(?:\[[^\]]*\]|[^,])+", text.replace(" ", ""))
