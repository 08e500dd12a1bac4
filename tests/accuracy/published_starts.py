"""Start-up logs of vLLM that were found after the closed form was made (published_starts.toml), beside it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from memprof.device.catalog import find_gpu
from memprof.estimate.serving.cache import build_layout
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.vllm import compute_vllm_budget
from memprof.serving.releases import read_vllm_rules
from memprof.units import GIB
from tests.accuracy.serving_rows import Comparison, Figure

STARTS = Path(__file__).with_name("published_starts.toml")
# A GPU that the source does not name has weights and the layout of its cache alone; any GPU gives these.
_ANY_GPU = "h200-141gb"


def compare_starts() -> Iterator[Comparison]:
    """Yield a comparison of each published start."""
    for number, row in enumerate(tomllib.loads(STARTS.read_text(encoding="utf-8"))["start"], 1):
        yield _compare(f"P{number}", row)


def _compare(key: str, row: dict[str, Any]) -> Comparison:
    fields = dict(row["options"])
    total = fields.pop("total", None)
    options = ServingOptions(release=row["release"], total_bytes=int(total * GIB) if total else None, **fields)
    model = load_served_model(row["model"])
    budget = compute_vllm_budget(model, find_gpu(row["gpu"] or _ANY_GPU), options)
    layout = build_layout(
        model, read_vllm_rules(row["release"]), options.tensor_parallel, options.kv_cache_dtype,
        budget.max_num_batched_tokens or 0, prefix_caching=options.prefix_caching,
    )  # fmt: skip
    length, cache = budget.context_length or 0, row.get("kv")
    computed: dict[str, tuple[float | None, float | None]] = {}
    computed["weights"] = (row.get("weights"), _gib(budget.weights_bytes))
    if row["gpu"]:
        computed["profile peak"] = (row.get("peak"), _gib(budget.profile_peak_bytes))
        computed["outside torch"] = (row.get("outside"), _gib(budget.outside_torch_bytes))
        computed["CUDA graphs"] = (row.get("graphs"), _gib(budget.graph_bytes))
        computed["KV cache"] = (cache, _gib(budget.kv_cache_bytes))
        computed["tokens"] = (row.get("tokens"), budget.num_tokens)
    if cache and "tokens" in row:
        computed["layout"] = (row["tokens"], layout.count_tokens(int(cache * GIB), length))
    if cache and "concurrency" in row:
        computed["layout"] = (row["concurrency"], layout.compute_concurrency(int(cache * GIB), length))
    figures = tuple(
        Figure(kind, float(published), float(value))
        for kind, (published, value) in computed.items()
        if published is not None and value is not None
    )
    result = Comparison(
        key, "vllm", row["release"], row["model"], row["gpu"], options.tensor_parallel, figures,
        started=row.get("starts", True), is_exclusive="cause" not in row,
    )  # fmt: skip
    if not row["gpu"]:
        return result
    tokens = row.get("tokens")
    is_in_band = None
    if tokens is not None:
        is_in_band = (budget.num_tokens_low or 0) <= tokens <= (budget.num_tokens_high or 0)
    return replace(result, starts=budget.starts, is_in_band=is_in_band)


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GIB
