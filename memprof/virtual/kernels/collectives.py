"""Collectives that are operators, as DTensor and tensor parallelism call them.

Their meta kernels make the results that CUDA's make. What hands a result on until it is waited for makes nothing.
"""

from __future__ import annotations

from typing import Any

from memprof.torch_private import distributed
from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_AsyncCollectiveTensor: Any = distributed.AsyncCollectiveTensor.get(None)
"""None in a build of torch without torch.distributed."""


@kernel("_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_to_all_single")
def kept_collective(launch: Launch) -> Any:
    """What it is given lives until its result is waited for: NCCL's work keeps it, and torch the work
    (ProcessGroupNCCL.hpp, `stashed_for_allocator_safety_`; torch/csrc/distributed/c10d/Functional.cpp)."""
    result = launch.run()
    launch.keep_until_waited(result, launch.args[0])
    return result


@kernel("_c10d_functional.wait_tensor", on_host=True)
def wait_tensor(launch: Launch) -> Any:
    """Gives back the tensor that it is given (torch/csrc/distributed/c10d/Functional.cpp)."""
    if not launch.args[0].is_meta:
        return NotImplemented
    launch.waited(launch.args[0])
    return launch.args[0]


@kernel("_c10d_functional._wrap_tensor_autograd", on_host=True)
def wrap_tensor(launch: Launch) -> Any:
    """The same tensor, which is waited for where it is first used (torch/distributed/_functional_collectives.py)."""
    return _AsyncCollectiveTensor(launch.args[0])
