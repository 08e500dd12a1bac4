"""Construction of the result of `memprof compare` from two runs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from memprof.ledger.stage_amounts import Stage
from memprof.report.documents import comparison
from memprof.report.matching.runs import (
    ALL_TENSORS,
    ALLOCATED,
    BRIDGE_STEPS,
    DEVICE_USED,
    HOST,
    KERNELS,
    RESERVED,
    TOTALS,
    ComparedRun,
    StageKey,
)
from memprof.report.matching.tensors import match_tensors
from memprof.report.matching.tolerance import Tolerance
from memprof.spec import TargetSpec
from memprof.units import format_ranges
from memprof.version import __version__

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(TargetSpec) if f.default is not dataclasses.MISSING}

_STAGE_AMOUNTS = ("allocated_bytes", "delta_bytes", "peak_allocated_bytes")  # compared in stages of both runs
_KERNELS_DIFFER = "a CPU and a GPU run other kernels"


def build_comparison(a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> comparison.Comparison:
    """Return the comparison of two runs."""
    settings, same_settings = _compare_settings(a, b)
    totals = (*(_compare_total(name, a, b, tolerance) for name in TOTALS), *_compare_ranks(a, b, tolerance))
    match = match_tensors(
        [row for row in a.tensors if row.category != KERNELS],
        [row for row in b.tensors if row.category != KERNELS],
        by_shape=a.has_shapes and b.has_shapes,
    )
    return comparison.Comparison(
        schema=comparison.SCHEMA,
        memprof_version=__version__,
        command="compare",
        a=a.summary,
        b=b.summary,
        tolerance=tolerance.text,
        within=all(row.within for row in totals if row.compared),
        settings=settings,
        same_settings=same_settings,
        totals=totals,
        stages=_compare_stages(a, b),
        categories=_compare_categories(a.categories, b.categories),
        tensors=match.rows,
        same_tensors=match.num_same,
        same_tensors_bytes=match.same_bytes,
        tensors_matched_by=match.matched_by,
        kernels_a=_sum_kernels(a),
        kernels_b=_sum_kernels(b),
        reserved=tuple(
            comparison.BridgeRow(name, a.bridge[name], b.bridge[name], _subtract(a.bridge[name], b.bridge[name]))
            for name in BRIDGE_STEPS
            if a.bridge[name] is not None or b.bridge[name] is not None
        ),
        seconds_a=_sum_seconds(a),
        seconds_b=_sum_seconds(b),
        findings=_compare_findings(a.findings, b.findings),
        assumptions_only_in_a=tuple(assumption for assumption in a.assumptions if assumption not in b.assumptions),
        assumptions_only_in_b=tuple(assumption for assumption in b.assumptions if assumption not in a.assumptions),
    )


def _subtract(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else b - a


def _compare_settings(a: ComparedRun, b: ComparedRun) -> tuple[tuple[comparison.SettingRow, ...], int]:
    all_names = dict.fromkeys([*a.settings, *b.settings])
    names = [name for name in all_names if all(run.has_all_settings or name in run.settings for run in (a, b))]
    # An option that is newer than a report had its default then.
    rows = [
        comparison.SettingRow(name, *(run.settings.get(name, _DEFAULTS.get(name)) for run in (a, b))) for name in names
    ]
    differing_rows = tuple(row for row in rows if _normalize_setting(row.a) != _normalize_setting(row.b))
    return differing_rows, len(rows) - len(differing_rows)


def _normalize_setting(value: Any) -> Any:
    """Return a setting's value in the form of JSON, and None for unset values (False, "", [])."""
    if isinstance(value, list | tuple):
        return [_normalize_setting(item) for item in value] or None
    return None if value is False or value == "" else value


def _compare_total(name: str, a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> comparison.TotalRow:
    a_bytes, b_bytes = a.totals[name], b.totals[name]
    reason = ""
    if a_bytes is None or b_bytes is None:
        reason = "not known of both"
    elif name in (ALL_TENSORS, ALLOCATED, RESERVED, DEVICE_USED, HOST) and a.summary.on_gpu != b.summary.on_gpu:
        reason = _KERNELS_DIFFER
    elif name == DEVICE_USED and a.summary.source != b.summary.source:
        reason = "other processes are not simulated"
    return _build_total(name, a_bytes, b_bytes, tolerance, reason)


def _build_total(
    name: str, a_bytes: int | None, b_bytes: int | None, tolerance: Tolerance, why_not: str
) -> comparison.TotalRow:
    is_within = None if why_not else tolerance.allows(a_bytes or 0, b_bytes or 0)
    return comparison.TotalRow(name, a_bytes, b_bytes, _subtract(a_bytes, b_bytes), not why_not, is_within, why_not)


def _compare_ranks(a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> Iterator[comparison.TotalRow]:
    """Yield rows that compare the allocated peaks of ranks; ranks with the same bytes share a row."""
    ranks_by_bytes: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in sorted(a.ranks.keys() | b.ranks.keys()):
        ranks_by_bytes.setdefault((a.ranks.get(rank), b.ranks.get(rank)), []).append(rank)
    for (a_bytes, b_bytes), ranks in ranks_by_bytes.items():
        reason = "" if a_bytes is not None and b_bytes is not None else "not run in both"
        if a.summary.on_gpu != b.summary.on_gpu:
            reason = _KERNELS_DIFFER
        name = f"{ALLOCATED}, rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"
        yield _build_total(name, a_bytes, b_bytes, tolerance, reason)


def _compare_stages(a: ComparedRun, b: ComparedRun) -> tuple[comparison.StageRow, ...]:
    rows = []
    for position, key in enumerate(_merge_keys(list(a.stages), list(b.stages))):
        a_stage, b_stage = a.stages.get(key), b.stages.get(key)
        stage = b_stage if a_stage is None or (b_stage is not None and b_stage.stack) else a_stage
        assert stage is not None
        difference, status = None, comparison.ONLY_IN_B if a_stage is None else comparison.ONLY_IN_A
        if a_stage is not None and b_stage is not None:
            difference = b_stage.peak_allocated_bytes - a_stage.peak_allocated_bytes
            is_equal = all(getattr(a_stage, name) == getattr(b_stage, name) for name in _STAGE_AMOUNTS)
            status = comparison.SAME if is_equal else comparison.DIFFERS
        key_fields = (position, *key[:2], stage.micro_batch, stage.stack, stage.index)
        amounts = _build_amounts(a_stage), _build_amounts(b_stage)
        rows.append(comparison.StageRow(*key_fields, status, *amounts, difference))
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_bytes or 0)))


def _build_amounts(stage: Stage | None) -> comparison.StageBytes | None:
    names = [field.name for field in dataclasses.fields(comparison.StageBytes)]
    return None if stage is None else comparison.StageBytes(**{name: getattr(stage, name) for name in names})


def _merge_keys(a: list[StageKey], b: list[StageKey]) -> list[StageKey]:
    """Return the union of two lists of keys: those of `a` in order, the others after their predecessor in `b`."""
    a_keys = set(a)
    successors: dict[StageKey | None, list[StageKey]] = defaultdict(list)
    predecessor: StageKey | None = None
    for key in b:
        if key in a_keys:
            predecessor = key
        else:
            successors[predecessor].append(key)
    merged = list(successors[None])
    for key in a:
        merged += [key, *successors[key]]
    return merged


def _compare_categories(a: dict[str, int], b: dict[str, int]) -> tuple[comparison.CategoryRow, ...]:
    sizes = ((name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b]))
    rows = [comparison.CategoryRow(name, a_bytes, b_bytes, b_bytes - a_bytes) for name, a_bytes, b_bytes in sizes]
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_bytes), -max(row.a_bytes, row.b_bytes))))


def _sum_kernels(run: ComparedRun) -> comparison.KernelMemory:
    kernels = [row for row in run.tensors if row.category == KERNELS]
    return comparison.KernelMemory(
        kind="CUDA kernels" if run.summary.on_gpu else "CPU kernels",
        num_bytes=sum(tensor.total_bytes for tensor in kernels),
        tensors=tuple(sorted(kernels, key=lambda tensor: -tensor.total_bytes)),
    )


def _sum_seconds(run: ComparedRun) -> float | None:
    seconds = [stage.seconds for stage in run.stages.values() if stage.seconds is not None]
    return sum(seconds) if seconds else None


def _compare_findings(
    a: dict[str, int | None] | None, b: dict[str, int | None] | None
) -> tuple[comparison.FindingRow, ...] | None:
    if a is None or b is None:
        return None
    rows = [
        comparison.FindingRow(name, name in a, name in b, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])
    ]
    differing_rows = [row for row in rows if row.in_a != row.in_b or row.a_bytes != row.b_bytes]
    return tuple(sorted(differing_rows, key=lambda row: -abs((row.b_bytes or 0) - (row.a_bytes or 0))))
