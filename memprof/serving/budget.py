"""How an inference engine divides a GPU's memory at start-up: weights, profile run, CUDA graphs and KV cache.

Three sources fill the same budget: the closed form (estimate/serving/), the engine's own code on the virtual GPU, and a
start-up log (doctor/).
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.json_values import JsonValue

# Sources of a budget.
CLOSED_FORM, RUN, LOG = "closed form", "run", "log"


@dataclass(frozen=True, slots=True)
class BudgetChange(JsonValue):
    """One changed option of an engine, and its predicted effect on the budget."""

    flag: str  # Such as "--gpu-memory-utilization 0.95".
    kv_cache_bytes: int  # Of one GPU, with the change.
    num_tokens: int  # Tokens in the KV cache with the change; 0: the engine does not start.
    source: str = CLOSED_FORM  # CLOSED_FORM or RUN.
    cost: str = ""  # What the change gives up; empty: nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget(JsonValue):
    """The memory of one GPU of an engine after start-up, in bytes; None: not known, as in a log that lacks it."""

    engine: str  # vllm, sglang or llama.cpp.
    release: str | None = None  # The engine's release, such as 0.33.0.
    source: str = CLOSED_FORM  # CLOSED_FORM, RUN or LOG.
    model: str | None = None
    gpu: str | None = None  # Name in memprof's catalog, or what the log calls it.
    tensor_parallel: int = 1  # GPUs over which each layer is divided.
    dtype: str | None = None  # Of activations, and of weights that are not quantized.
    quantization: str | None = None  # Format of the weights; None: not quantized.
    kv_cache_dtype: str | None = None
    context_length: int | None = None  # Longest sequence, the engine's max_model_len or context_length, in tokens.
    max_num_seqs: int | None = None  # Most requests in a step.
    max_num_batched_tokens: int | None = None  # Most tokens in a step.
    total_bytes: int | None = None  # Of the GPU, as CUDA reports it.
    utilization: float | None = None  # Fraction of the total that the engine may use.
    weights_bytes: int | None = None
    outside_torch_bytes: int | None = None  # CUDA context, libraries and NCCL; what vLLM calls non-torch memory.
    buffers_bytes: int | None = None  # Buffers of the engine that stay beside the weights; None: in another part.
    profile_peak_bytes: int | None = None  # Most that torch allocated in the profile run, beyond the weights.
    profile_peak_reason: str = ""  # Which tensors that peak consists of.
    graph_bytes: int | None = None  # CUDA graphs, as the engine subtracts them before it sizes the KV cache.
    graph_taken_bytes: int | None = None  # CUDA graphs, as they were captured.
    kv_cache_bytes: int | None = None
    block_size: int | None = None  # Tokens in a block of the KV cache.
    num_blocks: int | None = None
    num_tokens: int | None = None  # Tokens that the KV cache holds, as the engine prints them.
    num_tokens_low: int | None = None  # Bounds of an estimated `num_tokens`.
    num_tokens_high: int | None = None
    longest_context: int | None = None  # Longest context_length with which the engine starts.
    concurrency: float | None = None  # Requests of context_length tokens that the KV cache holds at once.
    requested_concurrency: int | None = None  # Requests of context_length tokens that were requested at once.
    least_gpus: int | None = None  # Least number of these GPUs that starts with what was asked.
    refusal: str = ""  # The engine's message if it does not start; empty: it starts.
    changes: tuple[BudgetChange, ...] = ()  # Most tokens first.
    command: str = ""  # Starts the engine with these options, or with the first ones that start.
    assumptions: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Return whether the engine starts."""
        return not self.refusal

    @property
    def budget_bytes(self) -> int | None:
        """Return the bytes that the engine may use of the GPU: total times utilization."""
        if self.total_bytes is None or self.utilization is None:
            return None
        return int(self.total_bytes * self.utilization)

    @property
    def bytes_per_token(self) -> float | None:
        """Return bytes of KV cache per token on one GPU, averaged over all groups of layers."""
        return self.kv_cache_bytes / self.num_tokens if self.kv_cache_bytes and self.num_tokens else None
