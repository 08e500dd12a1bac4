"""Published start-up logs of inference engines (shared/serving.csv) beside the closed form of `memprof recommend`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memprof.device.catalog import Gpu, find_gpu
from memprof.errors import MemprofError, UsageError
from memprof.estimate.serving.cache import build_layout
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.model import ServedModel
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.sglang import count_pool_token_bytes
from memprof.estimate.serving.vllm import compute_vllm_budget
from memprof.serving.releases import read_vllm_rules
from memprof.units import GIB

# Builds of a fork have no release; their rules are those of the release that they began with.
FORK_RELEASE = "0.22.0"
_GPUS = {
    "H100 NVL": "h100-nvl-94gb", "H100": "h100-80gb", "A100 40": "a100-40gb", "A100": "a100-80gb", "H200": "h200-141gb",
    "A6000": "rtx-a6000", "L40S": "l40s", "L4": "l4", "PRO 6000": "rtx-pro-6000", "RTX 5090": "rtx-5090",
    "RTX 3090": "rtx-3090", "RTX 4090": "rtx-4090", "B200": "b200",
}  # fmt: skip
_CACHE_DTYPES = {"fp4_e2m1": "nvfp4", "bf16": "auto", "bfloat16": "auto", "": "auto"}
_NAMES = {
    "gemma-4-12B-it-AWQ (local)": "google/gemma-4-12B-it-AWQ",
    "mattbucci/gemma-4-26B-AWQ": "google/gemma-4-26B-A4B-it-AWQ",
    "mattbucci/gemma-4-31B-AWQ": "google/gemma-4-31B-it-AWQ",
}


def read_number(text: str) -> float | None:
    """The number in a cell, such as 0.95; None: there is none, or words."""
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


@dataclass(frozen=True)
class Figure:
    """One figure of a log and the closed form's, in bytes or tokens."""

    kind: str  # weights, profile peak, KV cache, tokens or layout.
    published: float
    computed: float

    @property
    def error(self) -> float:
        """The signed relative error."""
        return self.computed / self.published - 1


@dataclass(frozen=True)
class Comparison:
    """A row with its figures, or why it is not compared."""

    key: str
    engine: str
    version: str
    model: str
    gpu: str
    tensor_parallel: int
    figures: tuple[Figure, ...] = ()
    starts: bool | None = None  # As computed; None: not computed.
    started: bool = True
    is_exclusive: bool = True  # Whether nothing else had the memory, so that its KV cache can be predicted.
    is_in_band: bool | None = None  # Whether the published tokens are within the stated band.
    skipped: str = ""


def compare_rows(shared: Path, *, only_complete: bool = True) -> Iterator[Comparison]:
    """Yield a comparison of each row."""
    with (shared / "serving.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["engine"] in ("vllm", "sglang") and (row["complete"] == "y" or not only_complete):
                yield _compare(row)


def _compare(row: dict[str, str]) -> Comparison:
    gpu_name = row["gpu"].replace("NVIDIA ", "")
    ranks = int(read_number(row["tp"]) or 1)
    result = Comparison(
        row["id"], row["engine"], row["version"].split(" ")[0], row["model"], gpu_name, ranks,
        started=row["outcome"].startswith(("started", "pool")), is_exclusive=not _is_shared(row),
    )  # fmt: skip
    reason = _find_skip_reason(row)
    if reason:
        return replace(result, skipped=reason)
    try:
        model = load_served_model(_NAMES.get(row["model"], row["model"]))
    except MemprofError as error:
        return replace(result, skipped=error.line.partition(" (")[0])
    return _compare_vllm(row, result, model) if row["engine"] == "vllm" else _compare_sglang(row, result, model)


def _is_shared(row: dict[str, str]) -> bool:
    """A GB10 has the memory of its CPU: other programs were in it (shared/serving.md)."""
    return "GB10" in row["gpu"]


def _find_skip_reason(row: dict[str, str]) -> str:
    if (row["pp"] or "1") != "1":
        return "pipeline parallel"
    if "skip_layers" in row["other_flags"]:
        return "layers with another cache dtype"
    if "dp8" in row["dp_ep"] or "dp32" in row["dp_ep"]:
        return "data parallel attention"
    return ""


def find_row_gpu(row: dict[str, str]) -> Gpu:
    """The catalog's GPU of a row; one that the catalog lacks stands in with the row's memory."""
    try:
        return find_gpu(row["gpu"])
    except UsageError:
        pass
    for words, key in _GPUS.items():
        if words in row["gpu"]:
            return find_gpu(key)
    total, sms = (15.92, 36) if "5060 Ti" in row["gpu"] else (float(row["total_gpu_gib"] or 119.63), 48)
    return replace(find_gpu("rtx-5090"), key="other", name=row["gpu"], total_bytes=int(total * GIB), num_sms=sms)


def make_options(row: dict[str, str]) -> ServingOptions:
    """The options of a row's engine."""

    def number(name: str) -> int | None:
        return int(row[name]) if re.fullmatch(r"\d+", row[name]) else None

    block = re.search(r"block_size=(\d+)", row["other_flags"])
    has_release = re.match(r"\d+\.\d+", row["version"]) is not None
    release = FORK_RELEASE if row["version"].startswith("0.1.") else row["version"] if has_release else None
    dtype = row["kv_cache_dtype"].split(" ")[0]
    return ServingOptions(
        release=release, context_length=number("max_model_len"),
        tensor_parallel=int(read_number(row["tp"]) or 1), utilization=read_number(row["mem_util"]),
        max_num_seqs=number("max_num_seqs"), max_num_batched_tokens=number("max_num_batched_tokens"),
        kv_cache_dtype=_CACHE_DTYPES.get(dtype, dtype), block_size=int(block[1]) if block else None,
        is_eager=row["enforce_eager"] == "y",
        prefix_caching=not re.search("prefix caching off|enable_prefix_caching=False", row["other_flags"]),
        profiles_images="language_model_only" not in row["other_flags"],
        total_bytes=int(total * GIB) if (total := read_number(row["total_gpu_gib"])) else None,
    )  # fmt: skip


def _compare_vllm(row: dict[str, str], result: Comparison, model: ServedModel) -> Comparison:
    gpu, options = find_row_gpu(row), make_options(row)
    try:
        budget = compute_vllm_budget(model, gpu, options)
    except MemprofError as error:
        return replace(result, skipped=error.line)
    figures = []
    for kind, column, computed in (
        ("weights", "model_loading_gib", budget.weights_bytes),
        ("profile peak", "activation_peak_gib", budget.profile_peak_bytes),
        ("KV cache", "kv_cache_gib", budget.kv_cache_bytes),
    ):
        published = read_number(row[column])
        if published and computed is not None:
            # Since 0.28 the printed peak has the estimated CUDA graphs in it.
            has_graphs = kind == "profile peak" and read_vllm_rules(options.release).counts_penalties_in_profile
            extra = (budget.graph_bytes or 0) if has_graphs else 0
            figures.append(Figure(kind, published * GIB, float(computed + extra)))
    is_in_band = None
    tokens, cache = read_number(row["kv_tokens"]), read_number(row["kv_cache_gib"])
    if tokens and budget.num_tokens is not None and budget.context_length:
        figures.append(Figure("tokens", tokens, float(budget.num_tokens)))
        is_in_band = (budget.num_tokens_low or 0) <= tokens <= (budget.num_tokens_high or 0)
        if cache:
            layout = build_layout(
                model, read_vllm_rules(options.release), options.tensor_parallel, options.kv_cache_dtype,
                budget.max_num_batched_tokens or 2048, block_size=options.block_size,
                prefix_caching=options.prefix_caching,
            )  # fmt: skip
            count = layout.count_tokens(int(cache * GIB), budget.context_length)
            figures.append(Figure("layout", tokens, float(count)))
    return replace(result, figures=tuple(figures), starts=budget.starts, is_in_band=is_in_band)


def _compare_sglang(row: dict[str, str], result: Comparison, model: ServedModel) -> Comparison:
    numbers = [read_number(row[name]) for name in ("sg_avail_before_load", "sg_avail_after_load", "mem_util")]
    if None in numbers or not row["sg_tokens"]:
        return replace(result, skipped="too few figures")
    dtype = row["kv_cache_dtype"].split(" ")[0]
    ratio = re.search(r"swa_full_tokens_ratio=([\d.]+)", row["other_flags"])
    rate = count_pool_token_bytes(
        model, result.tensor_parallel, _CACHE_DTYPES.get(dtype, dtype), float(ratio[1]) if ratio else 0.8
    )
    before, after, fraction = (number or 0.0 for number in numbers)
    free = (after - before * (1 - fraction)) * GIB
    published = max(int(tokens) for tokens in row["sg_tokens"].split("|"))
    return replace(result, figures=(Figure("layout", float(published), float(free // rate)),), starts=free > 0)


def summarize(comparisons: list[Comparison], kind: str, *, exclusive: bool = True) -> tuple[int, float, float]:
    """Number of figures, and the median and 90th percentile of their absolute errors."""
    errors = sorted(
        abs(figure.error)
        for row in comparisons
        for figure in row.figures
        if figure.kind == kind and (row.is_exclusive or not exclusive)
    )
    if not errors:
        return 0, 0.0, 0.0
    return len(errors), errors[len(errors) // 2], errors[min(int(len(errors) * 0.9), len(errors) - 1)]
