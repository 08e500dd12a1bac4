"""CUDA graphs of vLLM: how much its profiler estimates, from published start-up logs.

The profiler captures two graphs of each kind, and counts the second one's bytes, at least 1 MiB, for each other graph
(v1/worker/gpu_model_runner.py, profile_cudagraph_memory, 0.20 to 0.28). What the first takes does not follow from
shapes: it is the driver's. The table is small, and its band wide.
"""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.estimate.serving.model import ServedModel
from memprof.units import GIB, MIB

# The first graph, from the estimates of 11 published logs of 0.19 to 0.22 with 51 sizes of piecewise graphs and 35 or
# 51 full ones: 0.19 GiB together with 18 and 26 layers, 0.31 to 0.44 with 30 to 48 on Blackwell; 0.84 with 32 layers on
# an H100.
_FIRST_BYTES, _LAYER_BYTES, _HOPPER_LAYER_BYTES = 16 * MIB, 6 * MIB, 24 * MIB
_NEXT_BYTES = MIB
_MAX_CAPTURE_SIZE = 512  # vllm/config/vllm.py, _set_cudagraph_sizes.
# FlashInfer makes a decode wrapper with its own workspace for each size of full graphs: 3.96, 4.88, 5.03 and 5.63 GiB
# for 35 sizes in logs with an fp8 or nvfp4 cache on GPUs of compute capability 12.
_FLASHINFER_BYTES = round(4.8 * GIB / 35)
_QUANTIZED_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")


def list_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens for which piecewise graphs are captured, without speculative decoding; full ones are
    captured for those up to `max_num_seqs` (vllm/config/vllm.py, _set_cudagraph_sizes, 0.22)."""
    largest = min(2 * max_num_seqs, _MAX_CAPTURE_SIZE, max_num_batched_tokens)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_CAPTURE_SIZE + 1, 16))
    return [size for size in sizes if size <= largest]


def estimate_graph_bytes(
    model: ServedModel, gpu: Gpu, kv_cache_dtype: str, max_num_seqs: int, max_num_batched_tokens: int,
    *, has_loras: bool = False,
) -> int:  # fmt: skip
    """Return the CUDA graph memory that vLLM's profiler estimates, in bytes; with adapters each graph is captured with
    and without them (cudagraph_specialize_lora, vllm/v1/cudagraph_dispatcher.py)."""
    sizes = list_capture_sizes(max_num_seqs, max_num_batched_tokens)
    num_full = sum(size <= max_num_seqs for size in sizes)
    per_layer = _HOPPER_LAYER_BYTES if gpu.compute_capability[0] == 9 else _LAYER_BYTES
    num_next = (len(sizes) + num_full) * (2 if has_loras else 1) - 2
    num_bytes = _FIRST_BYTES + per_layer * model.geometry.layers + num_next * _NEXT_BYTES
    if kv_cache_dtype in _QUANTIZED_CACHES and gpu.compute_capability[0] == 12 and model.global_geometry is None:
        return max(num_bytes, num_full * _FLASHINFER_BYTES)
    return num_bytes
