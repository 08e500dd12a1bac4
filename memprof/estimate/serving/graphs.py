"""CUDA graphs of vLLM: how much its profiler estimates, from published start-up logs.

This does not follow from shapes: what a graph takes is the driver's. The table is small, and its band wide.
"""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.estimate.serving.model import ServedModel
from memprof.units import GIB, MIB

# Estimated CUDA graph memory of 11 published logs of 0.19 to 0.22 with 51 sizes of piecewise graphs and 35 or 51 full
# ones (cudagraph_capture_sizes up to 512): 0.19 GiB with 18 and 26 layers, 0.31 to 0.44 with 30 to 48 on Blackwell;
# 0.84 with 32 layers on an H100.
_BASE_BYTES, _LAYER_BYTES, _HOPPER_LAYER_BYTES = 100 * MIB, 6 * MIB, 24 * MIB
# FlashInfer makes a decode wrapper with its own workspace for each of 35 sizes: 3.96, 4.88, 5.03 and 5.63 GiB in logs
# with an fp8 or nvfp4 cache on GPUs of compute capability 12.
_FLASHINFER_BYTES = round(4.8 * GIB)
_QUANTIZED_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")


def estimate_graph_bytes(model: ServedModel, gpu: Gpu, kv_cache_dtype: str, max_num_seqs: int) -> int:
    """Return the CUDA graph memory that vLLM's profiler estimates, in bytes."""
    layers = model.geometry.layers
    if kv_cache_dtype in _QUANTIZED_CACHES and gpu.compute_capability[0] == 12 and model.global_geometry is None:
        return _FLASHINFER_BYTES * min(max_num_seqs, 256) // 256
    per_layer = _HOPPER_LAYER_BYTES if gpu.compute_capability[0] == 9 else _LAYER_BYTES
    share = min(max_num_seqs * 2, 512) / 512  # Sizes go up to twice max_num_seqs, at most 512.
    return round((_BASE_BYTES + per_layer * layers) * share)
