"""Memory outside torch that grows while vLLM starts, from published start-up logs; it follows from no shape."""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.serving.releases import VllmRules
from memprof.units import GIB, MIB

# Growth of memory that torch does not count, from the first CUDA call to the end of the profile run: libraries, local
# memory of kernels on each multiprocessor and, with several GPUs, NCCL and the buffers of all-reduce. Published logs on
# H100s: 0.13 to 0.14 GiB up to 0.17, 0.24 to 0.27 since 0.18; with tensor parallelism 0.55 and 2.07 to 2.21, and 0.27
# on A100s with 0.10. Other GPUs since 0.21: 0.08 GiB with 36 multiprocessors, 0.16 with 58, 0.43 with 188.
_OUTSIDE_HOPPER, _OUTSIDE_EARLIER = round(0.25 * GIB), round(0.13 * GIB)
_OUTSIDE_PER_SM = round(2.3 * MIB)
_OUTSIDE_PARALLEL_OLDEST = round(0.27 * GIB)
_OUTSIDE_PARALLEL, _OUTSIDE_PARALLEL_EARLIER = round(2.1 * GIB), round(0.55 * GIB)


def estimate_outside_torch(gpu: Gpu, rules: VllmRules, tensor_parallel: int) -> int:
    """Return the bytes outside torch that the engine subtracts on each GPU."""
    is_recent = rules.release >= (0, 18)
    if tensor_parallel == 1 and not is_recent:
        return _OUTSIDE_EARLIER
    if tensor_parallel == 1:
        return _OUTSIDE_HOPPER if gpu.compute_capability[0] == 9 else _OUTSIDE_PER_SM * gpu.num_sms
    if rules.release < (0, 11):
        return _OUTSIDE_PARALLEL_OLDEST
    # Without NVLink there is no custom all-reduce (distributed/device_communicators/custom_all_reduce.py).
    return _OUTSIDE_PARALLEL if is_recent and gpu.nvlink_bandwidth else _OUTSIDE_PARALLEL_EARLIER
