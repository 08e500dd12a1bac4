"""memprof: where the memory of a PyTorch run goes, without a GPU and with one.

    with memprof.virtual_gpu("h100-80gb") as gpu:
        ...            # your code, unmodified; "cuda" is the virtual card
    print(gpu.report())

    memprof.profile(train_step, model, optimizer, batch)  # a function, run twice on a virtual card: its report

    memprof.apply(model, ["chunked-loss"])  # remedies, in your own model

The public names are imported when first used, so that `import memprof` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.version import __version__

__all__ = ["__version__", "apply", "profile", "virtual_gpu"]

if TYPE_CHECKING:
    from memprof.api import apply, profile, virtual_gpu


def __getattr__(name: str) -> Any:
    if name in ("apply", "profile", "virtual_gpu"):
        from memprof import api

        return getattr(api, name)
    raise AttributeError(f"module 'memprof' has no attribute {name!r}")
