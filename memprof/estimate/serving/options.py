"""Options of an engine that change its memory, as a user gives them; None: the engine's default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """The options of an engine's server."""

    release: str | None = None  # None: the latest whose source was read.
    context_length: int | None = None  # None: the model's.
    concurrency: int | None = None  # Requests at once that the KV cache has to hold.
    tensor_parallel: int = 1
    utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    block_size: int | None = None
    max_loras: int = 0  # Adapters in a batch, each with a slot; 0: LoRA is not enabled.
    max_lora_rank: int | None = None
    is_eager: bool = False
    prefix_caching: bool = True
    profiles_images: bool = True
    total_bytes: int | None = None  # Of the GPU, if a log says so; None: as in the catalog.
    outside_torch_bytes: int | None = None  # Measured; None: estimated.
    free_bytes: int | None = None  # When the engine starts; None: all but the CUDA context.
