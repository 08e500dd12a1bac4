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
    from memprof.library import profile
    from memprof.pipeline import virtual_gpu
    from memprof.remedies.implementation import apply


def __getattr__(name: str) -> Any:
    if name == "profile":
        from memprof.library import profile

        return profile
    if name == "virtual_gpu":
        from memprof.pipeline import virtual_gpu

        return virtual_gpu
    if name == "apply":
        from memprof.remedies.implementation import apply

        return apply
    raise AttributeError(f"module 'memprof' has no attribute {name!r}")
