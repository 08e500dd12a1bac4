"""CUDA graphs of vLLM: how much its profiler estimates, and memory outside torch, from published start-up logs.

Neither follows from shapes: what a graph takes is the driver's. The table is small, and its band wide.
"""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.estimate.serving.model import ServedModel
from memprof.serving.releases import VllmRules
from memprof.units import GIB, MIB

# Estimated CUDA graph memory of 11 published logs of 0.19 to 0.22 with 51 sizes of piecewise graphs and 35 or 51 full
# ones (cudagraph_capture_sizes up to 512): 0.19 GiB with 18 and 26 layers, 0.31 to 0.44 with 30 to 48 on Blackwell;
# 0.84 with 32 layers on an H100.
_BASE_BYTES, _LAYER_BYTES, _HOPPER_LAYER_BYTES = 100 * MIB, 6 * MIB, 24 * MIB
# FlashInfer makes a decode wrapper with its own workspace for each of 35 sizes: 3.96, 4.88, 5.03 and 5.63 GiB in logs
# with an fp8 or nvfp4 cache on GPUs of compute capability 12.
_FLASHINFER_BYTES = round(4.8 * GIB)
_QUANTIZED_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
# Growth of memory that torch does not count, from the first CUDA call to the end of the profile run: libraries, local
# memory of kernels on each multiprocessor and, with several GPUs, NCCL and the buffers of all-reduce. Published logs on
# H100s: 0.13 to 0.14 GiB up to 0.17, 0.24 to 0.27 since 0.18; with tensor parallelism 0.55 and 2.07 to 2.21, and 0.27
# on A100s with 0.10. Other GPUs since 0.21: 0.08 GiB with 36 multiprocessors, 0.16 with 58, 0.43 with 188.
_OUTSIDE_HOPPER, _OUTSIDE_EARLIER = round(0.25 * GIB), round(0.13 * GIB)
_OUTSIDE_PER_SM = round(2.3 * MIB)
_OUTSIDE_PARALLEL_OLDEST = round(0.27 * GIB)
_OUTSIDE_PARALLEL, _OUTSIDE_PARALLEL_EARLIER = round(2.1 * GIB), round(0.55 * GIB)


def estimate_graph_bytes(model: ServedModel, gpu: Gpu, kv_cache_dtype: str, max_num_seqs: int) -> int:
    """Return the CUDA graph memory that vLLM's profiler estimates, in bytes."""
    layers = model.geometry.layers
    if kv_cache_dtype in _QUANTIZED_CACHES and gpu.compute_capability[0] == 12 and model.global_geometry is None:
        return _FLASHINFER_BYTES * min(max_num_seqs, 256) // 256
    per_layer = _HOPPER_LAYER_BYTES if gpu.compute_capability[0] == 9 else _LAYER_BYTES
    share = min(max_num_seqs * 2, 512) / 512  # Sizes go up to twice max_num_seqs, at most 512.
    return round((_BASE_BYTES + per_layer * layers) * share)


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
