"""Collectives that are operators, as DTensor and tensor parallelism call them.

Their meta kernels make the results that CUDA's make, but for waiting.
"""

from __future__ import annotations

from typing import Any

from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch


@kernel("_c10d_functional.wait_tensor", on_host=True)
def wait_tensor(launch: Launch) -> Any:
    """Gives back the tensor that it is given (torch/csrc/distributed/c10d/Functional.cpp)."""
    return launch.args[0] if launch.args[0].is_meta else NotImplemented
