"""What inference engines print of their memory while they start, as an `EngineBudget`: also of a start that worked.

vLLM's lines: v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py and v1/engine/core.py of 0.11 to 0.33, and
worker/worker.py of V0. SGLang's: srt/model_executor/model_runner.py and srt/managers/scheduler.py of 0.4 and 0.5.
llama.cpp's: src/llama-model.cpp, llama-kv-cache.cpp and llama-context.cpp of 2025; Ollama passes them on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from memprof.doctor.log_lines import strip_colors
from memprof.serving.budget import LOG, BudgetChange, EngineBudget
from memprof.units import GIB, MIB

_MAX_UTILIZATION = 0.98  # CUDA's context has the rest.
_MIN_GRAPH_EXCESS = 200 * MIB
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_COUNT = r"(\d[\d,]*)"
# Field -> patterns, of which the last match in the log counts.
_Patterns = Mapping[str, tuple[str, ...]]
_VLLM_SIZES: _Patterns = {
    "weights_bytes": (
        rf"Model loading took {_NUMBER} ?Gi?B", rf"Loading model weights took {_NUMBER} ?Gi?B",
        rf"Actual usage is {_NUMBER} GiB for weight", rf"model weights take {_NUMBER} ?GiB",
    ),
    "profile_peak_bytes": (
        rf"torch peak memory increase: {_NUMBER} ?GiB", rf"{_NUMBER} GiB for peak activation",
        rf"activation peak memory takes {_NUMBER} ?GiB",
    ),
    "outside_torch_bytes": (
        rf"non-torch forward increase memory: {_NUMBER} ?GiB", rf"{_NUMBER} GiB for non-torch memory",
        rf"non_torch_memory takes {_NUMBER} ?GiB",
    ),
    "kv_cache_bytes": (
        rf"Available KV cache memory: {_NUMBER} ?GiB", rf"reserved for KV Cache is {_NUMBER} ?GiB",
    ),
    "total_bytes": (
        rf"Free memory on device[^(]*\(-?[\d.]+/{_NUMBER} GiB\)", rf"total_gpu_memory \({_NUMBER} ?GiB\)",
        rf"total capacity of {_NUMBER} GiB",
    ),
    "graph_bytes": (rf"Estimated CUDA graph memory: {_NUMBER} GiB total",),
    "graph_taken_bytes": (
        rf"Graph capturing finished in [\d.]+ secs?, took {_NUMBER} GiB", rf"{_NUMBER} GiB for CUDAGraph memory",
    ),
}  # fmt: skip
_VLLM_COUNTS: _Patterns = {
    "num_tokens": (rf"KV cache size: {_COUNT} tokens",),
    "num_blocks": (rf"# (?:GPU|cuda) blocks: {_COUNT}", rf"num_gpu_blocks is: {_COUNT}"),
    "context_length": (
        rf"concurrency for {_COUNT} tokens", rf"max_seq_len={_COUNT}", rf"max_model_len['\"]?[=:] ?{_COUNT}",
    ),
    "tensor_parallel": (rf"tensor_parallel_size['\"]?[=:] ?{_COUNT}",),
    "max_num_seqs": (rf"max_num_seqs['\"]?[=:] ?{_COUNT}",),
    "max_num_batched_tokens": (rf"max_num_batched_tokens['\"]?[=:] ?{_COUNT}",),
}  # fmt: skip
_VLLM_NUMBERS: _Patterns = {
    "utilization": (
        rf"[dD]esired GPU memory utilization (?:is )?\({_NUMBER},", rf"gpu_memory_utilization['\"]?[=:] ?{_NUMBER}",
        rf"gpu_memory_utilization \({_NUMBER}\)", rf"Requested memory: {_NUMBER} \(util\)",
    ),
    "concurrency": (rf"concurrency for [\d,]+ tokens per request: {_NUMBER}x",),
}  # fmt: skip
_VLLM_TEXTS: _Patterns = {
    "release": (r"(?:vLLM API server version|LLM engine \(v|vllm==) ?v?(\d[\w.+]*)",),
    "model": (r"with config: model='([^']+)'", r"'model(?:_tag)?': '([^']+)'"),
    "dtype": (r"\bdtype=torch\.(\w+)",),
    "quantization": (r"\bquantization=(?!None)'?(\w+)",),
    "kv_cache_dtype": (r"\bkv_cache_dtype=(?!auto)'?(\w+)",),
}
_SGLANG_SIZES: _Patterns = {
    "total_bytes": (rf"total capacity of {_NUMBER} GiB",),
    "graph_taken_bytes": (rf"Capture cuda graph end\b.*?mem usage={_NUMBER} ?GB",),
}
_SGLANG_COUNTS: _Patterns = {
    "num_tokens": (rf"#tokens: {_COUNT}", rf"max_total_num_tokens={_COUNT}"),
    "context_length": (rf"context_len={_COUNT}", rf"context_length={_COUNT}"),
    "tensor_parallel": (rf"\btp_size={_COUNT}",),
    "max_num_seqs": (rf"max_running_requests={_COUNT}",),
    "max_num_batched_tokens": (rf"chunked_prefill_size={_COUNT}",),
}
_SGLANG_NUMBERS: _Patterns = {"utilization": (rf"mem_fraction_static={_NUMBER}",)}
_SGLANG_TEXTS: _Patterns = {
    "model": (r"model_path='([^']+)'",), "dtype": (r"Load weight end\b.*?dtype=torch\.(\w+)",),
    "quantization": (r"\bquantization='(\w+)'",), "kv_cache_dtype": (r"Using KV cache dtype: torch\.(\w+)",),
}  # fmt: skip


_SGLANG_WEIGHTS = rf"Load weight end\b.*?mem usage={_NUMBER} ?GB"
_SGLANG_POOL = rf"#tokens: {_COUNT}, (?:K size: {_NUMBER} GB, V size: {_NUMBER} GB|KV size: {_NUMBER} GB)"
# What a server prints once, before anything else that is read here.
_START = re.compile(r"vLLM API server version|non-default args: |server_args=ServerArgs\(")


def read_engine_start(log: str) -> EngineBudget | None:
    """Return what a log says of an engine's memory at its last start; None: fewer than two sizes of an engine."""
    log = strip_colors(log)
    starts = [match.start() for match in _START.finditer(log)]
    last = None if not starts else _read_start(log[starts[-1] :])
    return last or _read_start(log)


def _read_start(log: str) -> EngineBudget | None:
    readers: tuple[tuple[str, Callable[[str], EngineBudget | None]], ...] = (
        (
            r"Available KV cache memory|KV cache size: |# GPU blocks|Model loading took|Loading model weights took",
            _read_vllm,
        ),
        (r"Load weight end|KV Cache is allocated|max_total_num_tokens=", _read_sglang),
        (r"model buffer size =|KV buffer size =", _read_llama_cpp),
    )
    for marks, read in readers:
        if re.search(marks, log):
            return read(log)
    return None


def _read_vllm(log: str) -> EngineBudget | None:
    fields = _read_fields(log, _VLLM_SIZES, _VLLM_COUNTS, _VLLM_NUMBERS, _VLLM_TEXTS)
    consumed = _find_last((rf"Actual usage is {_NUMBER} GiB for consumed memory",), log)
    if consumed is not None and "weights_bytes" in fields:
        fields["outside_torch_bytes"] = max(int(float(consumed) * GIB) - fields["weights_bytes"], 0)
    has_graphs_in_peak = consumed is not None and "graph_bytes" in fields and "profile_peak_bytes" in fields
    if has_graphs_in_peak:  # Since 0.28 the line's peak includes the estimated graphs.
        fields["profile_peak_bytes"] = max(fields["profile_peak_bytes"] - fields["graph_bytes"], 0)
    # An estimate that is only announced is not subtracted (0.19).
    if "graph_bytes" in fields and "In v0.19, CUDA graph memory profiling will be enabled" in log:
        fields.setdefault("graph_taken_bytes", fields["graph_bytes"])
        del fields["graph_bytes"]
    blocks, tokens, concurrency = (fields.get(name) for name in ("num_blocks", "num_tokens", "concurrency"))
    if blocks and tokens is None:
        fields["num_tokens"] = tokens = blocks * 16
    if tokens is None and concurrency and fields.get("context_length"):
        fields["num_tokens"] = int(concurrency * fields["context_length"])
    return _make_budget("vllm", fields)


def _read_sglang(log: str) -> EngineBudget | None:
    fields = _read_fields(log, _SGLANG_SIZES, _SGLANG_COUNTS, _SGLANG_NUMBERS, _SGLANG_TEXTS)
    # A draft model has weights and a pool of its own, and windowed layers have a pool beside that of full ones. Each
    # rank of tensor parallelism prints them all; one rank is read.
    ranks = re.findall(r"\bTP(\d+)\b", log)
    lines = [line for line in log.splitlines() if not re.search(r"\bTP\d", line) or f"TP{min(ranks)}" in line]
    weights = [float(size) for line in lines for size in re.findall(_SGLANG_WEIGHTS, line)]
    if weights:
        fields["weights_bytes"] = int(sum(weights) * GIB)
    pools = [match for line in lines for match in re.finditer(_SGLANG_POOL, line)]
    if pools:
        sizes = (float(size) for pool in pools for size in pool.groups()[1:] if size)
        fields["kv_cache_bytes"] = int(sum(sizes) * GIB)
        fields["num_tokens"] = max(int(pool[1].replace(",", "")) for pool in pools)
    if fields.get("num_tokens") and fields.get("context_length"):
        fields["concurrency"] = fields["num_tokens"] / fields["context_length"]
    return _make_budget("sglang", fields)


def _read_llama_cpp(log: str) -> EngineBudget | None:
    """Return the buffers of all GPUs together: llama.cpp prints one line for each."""
    fields: dict[str, Any] = {}
    device = r"(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\w*"
    for name, words in (
        ("weights_bytes", "model buffer"), ("kv_cache_bytes", "KV buffer"), ("profile_peak_bytes", "compute buffer"),
    ):  # fmt: skip
        sizes = dict(re.findall(rf"({device})\s+{words} size\s*=\s*{_NUMBER} MiB", log))
        if sizes:
            fields[name] = int(sum(map(float, sizes.values())) * MIB)
    tokens = _find_last((rf"\bn_ctx\s*=\s*{_COUNT}",), log)
    if tokens is not None:
        fields["num_tokens"] = fields["context_length"] = int(tokens.replace(",", ""))
    sequences = _find_last((rf"\bn_seq_max\s*=\s*{_COUNT}",), log)
    if sequences is not None:
        fields["max_num_seqs"] = int(sequences)
    model = _find_last((r"general\.name\s+str\s+= (.+)", r"loading model '([^']+)'"), log)
    if model is not None:
        fields["model"] = model.strip()
    if "profile_peak_bytes" in fields:
        fields["profile_peak_reason"] = "compute buffers"
    return _make_budget("llama.cpp", fields)


def _read_fields(log: str, sizes: _Patterns, counts: _Patterns, numbers: _Patterns, texts: _Patterns) -> dict[str, Any]:
    """Return the fields that the log has: sizes in bytes, counts, numbers and texts."""
    convert: tuple[tuple[_Patterns, Callable[[str], Any]], ...] = (
        (sizes, lambda text: int(float(text) * GIB)),
        (counts, lambda text: int(text.replace(",", ""))),
        (numbers, float),
        (texts, str),
    )
    return {
        name: read(text)
        for patterns, read in convert
        for name, alternatives in patterns.items()
        if (text := _find_last(alternatives, log)) is not None
    }


def _find_last(patterns: tuple[str, ...], log: str) -> str | None:
    """Return the last match of the first pattern that matches."""
    for pattern in patterns:
        matches = re.findall(pattern, log)
        if matches:
            return str(matches[-1])
    return None


def _make_budget(engine: str, fields: dict[str, Any]) -> EngineBudget | None:
    num_sizes = sum(name in fields for name in ("weights_bytes", "kv_cache_bytes", "profile_peak_bytes"))
    has_tokens = fields.get("num_tokens") is not None
    if num_sizes + has_tokens < 2:
        return None
    cache = fields.get("kv_cache_bytes")
    refusal = "" if cache is None or cache > 0 else f"nothing is left for the KV cache ({cache / GIB:.2f} GiB)"
    budget = EngineBudget(engine=engine, source=LOG, refusal=refusal, **fields)
    return replace(budget, changes=tuple(_list_changes(budget)))


def _list_changes(budget: EngineBudget) -> Iterator[BudgetChange]:
    """Yield changes whose effect follows from the log's own figures: a larger fraction, and graphs that took less than
    was kept for them; tokens are in proportion to the bytes of the cache."""
    cache, rate = budget.kv_cache_bytes, budget.bytes_per_token
    if budget.engine != "vllm" or cache is None:
        return

    def make(flag: str, num_bytes: int, cost: str) -> BudgetChange:
        tokens = 0 if rate is None else int(num_bytes / rate)
        return BudgetChange(flag, num_bytes, tokens, LOG, cost)

    total, utilization = budget.total_bytes, budget.utilization
    if total is not None and utilization is not None:
        missing = max(-cache, 0) / total
        target = 0.95
        if missing:  # A hundredth beyond what is missing, for some cache.
            target = math.ceil((utilization + missing) * 100 + 1) / 100
        if utilization < target <= _MAX_UTILIZATION:
            gained = int((target - utilization) * total)
            yield make(f"--gpu-memory-utilization {target:g}", cache + gained, "less is left to others")
    estimated, taken = budget.graph_bytes, budget.graph_taken_bytes
    if estimated is not None and taken is not None and estimated - taken > _MIN_GRAPH_EXCESS:
        excess = estimated - max(taken, 0)
        cost = f"graphs took {max(taken, 0) / GIB:.2f} GiB of {estimated / GIB:.2f} estimated"
        yield make("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0", cache + excess, cost)
