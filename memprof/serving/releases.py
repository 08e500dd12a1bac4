"""Rules of vLLM that changed from release to release, each with where it was read in vLLM's source."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.errors import UsageError

LATEST_VLLM = "0.33.0"
OLDEST_VLLM = (0, 8)
_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
# How the sampler's dummy run selects tokens; it decides the peak of most profile runs.
SORT, TRITON, FLASHINFER = "sort", "triton", "flashinfer"
# Families whose models had the V2 model runner before it became the default of all (vllm/config/vllm.py, 0.22 to 0.28).
_SECOND_RUNNER_DENSE = ("qwen3", "llama", "mistral")
_SECOND_RUNNER_EXPERTS = ("deepseek_v2", "qwen2_moe", "granitemoe")


@dataclass(frozen=True, slots=True)
class VllmRules:
    """The rules of one release of vLLM."""

    release: tuple[int, ...]

    @property
    def default_utilization(self) -> float:
        """Return gpu_memory_utilization's default: 0.9, since 0.20 0.92 (vllm/config/cache.py)."""
        return 0.92 if self.release >= (0, 20) else 0.9

    @property
    def limits_splits(self) -> bool:
        """Return whether weights are loaded with max_split_size_mb:20 (v1/worker/gpu_worker.py,
        _scoped_allocator_max_split, since 0.21), so that what a segment has beyond a large tensor stays unused."""
        return self.release >= (0, 21)

    def subtracts_graphs(self, *, is_second_runner: bool) -> bool:
        """Return whether estimated CUDA graphs are subtracted before the KV cache is sized: the default of
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is 0 in 0.19 and 1 in 0.20 (vllm/envs.py); 0.17 has no estimate. The
        V2 model runner estimates none before 0.29 (v1/worker/gpu/model_runner.py, profile_cudagraph_memory)."""
        return self.release >= (0, 29) or (self.release >= (0, 20) and not is_second_runner)

    def find_sampler(self, capability: tuple[int, int]) -> str:
        """Return how top-k and top-p are applied on a GPU of compute capability `capability`: by FlashInfer up to 0.10,
        where its image has it; by sorting up to 0.16; by a Triton kernel since 0.17
        (vllm/v1/sample/ops/topk_topp_triton.py); by FlashInfer since 0.21 (VLLM_USE_FLASHINFER_SAMPLER is then on) from
        7.5 on, since 0.25 from 8.0 on (attention/backends/flashinfer.py, supports_compute_capability)."""
        if self.release < (0, 11):
            return FLASHINFER
        if self.release >= (0, 21) and capability >= ((8, 0) if self.release >= (0, 25) else (7, 5)):
            return FLASHINFER
        return TRITON if self.release >= (0, 17) else SORT

    def count_float32_logits(self, sampler: str) -> int:
        """Return the tensors as large as the float32 logits (requests x vocabulary) at the sampler's peak, beside the
        logits in the model's dtype.

        Sorting: the logits, values and 64-bit indices of torch.sort with its own temporaries, 9 together
        (apply_top_k_top_p, 0.11). Triton: logits, probabilities and exponential noise (random_sample, 0.19).
        FlashInfer: logits, logits masked by top-k and probabilities (top_k_top_p_sampling_from_logits); logs of 0.10
        have one less.
        """
        if sampler == SORT:
            return 9
        return 2 if self.release < (0, 11) else 3

    @property
    def keeps_workspaces(self) -> bool:
        """Return whether the workspace of fused experts stays allocated: since 0.13
        (vllm/v1/worker/workspace.py, which 0.11 lacks)."""
        return self.release >= (0, 13)

    def uses_second_runner(self, family: str, *, is_dense: bool, is_quantized: bool) -> bool:
        """Return whether the V2 model runner is the default (vllm/config/vllm.py, use_v2_model_runner and
        DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, 0.22 to 0.29): for all models since 0.29; before that for few
        architectures, in 0.22 and 0.23 without quantized weights, and since 0.25 for all with neither experts nor
        states. `family` is the model's, "" with an image encoder."""
        if self.release >= (0, 29):
            return True
        if self.release >= (0, 25):
            return is_dense or family in _SECOND_RUNNER_EXPERTS
        if self.release >= (0, 24):
            return family in (*_SECOND_RUNNER_DENSE, *_SECOND_RUNNER_EXPERTS)
        families = _SECOND_RUNNER_DENSE if self.release >= (0, 23) else ("qwen3",)
        return self.release >= (0, 22) and family in families and not is_quantized

    @property
    def batches_video_frames(self) -> bool:
        """Return whether Gemma 4's image encoder takes many images or frames at once: since 0.22, before one
        (vllm/model_executor/models/gemma4_mm.py, _encoder_chunk)."""
        return self.release >= (0, 22)

    @property
    def warms_sampler_up(self) -> bool:
        """Return whether the V2 runner's profile run samples with top-k and top-p, too (since 0.33,
        v1/worker/gpu/model_runner.py, _dummy_sampler_run)."""
        return self.release >= (0, 33)

    @property
    def counts_penalties_in_profile(self) -> bool:
        """Return whether tensors that the runner makes before its profile run are subtracted: since 0.28 the memory
        that is no longer free is, before that only what torch allocated in the run (vllm/utils/mem_utils.py)."""
        return self.release >= (0, 28)

    @property
    def padded_group_ratio(self) -> float:
        """Return the ratio of the most frequent to the rarest kind of layers below which groups are as large as the
        former: 1.5 since 0.18, before 1.25; 0.11 has none (v1/core/kv_cache_utils.py,
        _get_kv_cache_groups_uniform_page_size)."""
        if self.release >= (0, 18):
            return 1.5
        return 1.25 if self.release >= (0, 12) else 1.0

    @property
    def caches_prefixes_of_states(self) -> bool:
        """Return whether prefix caching is on by default for models with states, which then have two for each request
        (vllm/config/model.py, is_prefix_caching_supported; since 0.26)."""
        return self.release >= (0, 26)

    @property
    def prints_tokens_by_length(self) -> bool:
        """Return whether the printed number of tokens is concurrency times max_model_len (since 0.20.1,
        v1/core/kv_cache_utils.py), not blocks over groups of layers times their size."""
        return self.release >= (0, 20, 1)

    @property
    def counts_tokens_in_flight(self) -> bool:
        """Return whether a window's cache holds the tokens of two steps (max_in_flight_tokens, vllm/config/vllm.py
        since 0.26): asynchronous scheduling has two at once."""
        return self.release >= (0, 26)

    @property
    def server_tokens_of_largest_gpus(self) -> int:
        """Return max_num_batched_tokens of `vllm serve` on GPUs of at least 160 GiB: 16,384 since 0.28
        (vllm/engine/arg_utils.py, get_batch_defaults), else as on those of 70 GiB."""
        return 16384 if self.release >= (0, 28) else 8192

    def choose_batch_limits(self, total_bytes: int, gpu_name: str) -> tuple[int, int]:
        """Return the defaults of max_num_seqs and max_num_batched_tokens of `vllm serve` on a GPU
        (vllm/engine/arg_utils.py, get_batch_defaults, 0.19 to 0.33)."""
        name = gpu_name.lower()
        # NVML tells no memory size of the GB10, and 0.33 also excludes it by name.
        if total_bytes < 70 << 30 or "a100" in name or "gb10" in name or "dgx spark" in name:
            return 256, 2048
        return 1024, self.server_tokens_of_largest_gpus if total_bytes >= 160 << 30 else 8192


def read_vllm_rules(release: str | None = None) -> VllmRules:
    """Return the rules of a release such as "0.19.0"; None: of the latest whose source was read. Raises UsageError:
    `release` is none, or older than the V1 engine."""
    match = _RELEASE.match(release or LATEST_VLLM)
    if match is None:
        raise UsageError("not a release of vLLM", value=release or "", hint="give one such as 0.19.0")
    rules = VllmRules(tuple(int(part or 0) for part in match.groups()))
    if rules.release < OLDEST_VLLM:
        hint = "the rules are those of the V1 engine, the default since 0.8"
        raise UsageError("this release of vLLM is not known here", value=release or "", hint=hint)
    return rules
