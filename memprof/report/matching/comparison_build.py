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

_DEFAULTS = {one.name: one.default for one in dataclasses.fields(TargetSpec) if one.default is not dataclasses.MISSING}

_STAGE_AMOUNTS = ("allocated_bytes", "delta_bytes", "peak_allocated_bytes")  # compared in stages of both runs
_OTHER_KERNELS = "a CPU and a GPU run other kernels"


def build_comparison(a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> comparison.Comparison:
    """Return the comparison of two runs."""
    settings, same_settings = _compare_settings(a, b)
    totals = (*(_compare_total(name, a, b, tolerance) for name in TOTALS), *_compare_ranks(a, b, tolerance))
    matched = match_tensors(
        [row for row in a.tensors if row.category != KERNELS],
        [row for row in b.tensors if row.category != KERNELS],
        by_shape=a.has_shapes and b.has_shapes,
    )
    return comparison.Comparison(
        schema=comparison.SCHEMA,
        memprof_version=__version__,
        command="compare",
        a=a.side,
        b=b.side,
        tolerance=tolerance.text,
        within=all(row.within for row in totals if row.compared),
        settings=settings,
        same_settings=same_settings,
        totals=totals,
        stages=_compare_stages(a, b),
        categories=_compare_categories(a.categories, b.categories),
        tensors=matched.rows,
        same_tensors=matched.num_same,
        same_tensors_bytes=matched.same_bytes,
        tensors_matched_by=matched.matched_by,
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
        assumptions_only_in_a=tuple(one for one in a.assumptions if one not in b.assumptions),
        assumptions_only_in_b=tuple(one for one in b.assumptions if one not in a.assumptions),
    )


def _subtract(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else b - a


def _compare_settings(a: ComparedRun, b: ComparedRun) -> tuple[tuple[comparison.SettingRow, ...], int]:
    both = dict.fromkeys([*a.settings, *b.settings])
    names = [name for name in both if all(run.has_all_settings or name in run.settings for run in (a, b))]
    # An option that is newer than a report had its default then.
    rows = [
        comparison.SettingRow(name, *(run.settings.get(name, _DEFAULTS.get(name)) for run in (a, b))) for name in names
    ]
    differing = tuple(row for row in rows if _plain_setting(row.a) != _plain_setting(row.b))
    return differing, len(rows) - len(differing)


def _plain_setting(value: Any) -> Any:
    """Return a setting as in JSON; unset values (False, "", []) become None, as in reports that lack the setting."""
    if isinstance(value, list | tuple):
        return [_plain_setting(one) for one in value] or None
    return None if value is False or value == "" else value


def _compare_total(name: str, a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> comparison.TotalRow:
    a_bytes, b_bytes = a.totals[name], b.totals[name]
    why = ""
    if a_bytes is None or b_bytes is None:
        why = "not known of both"
    elif name in (ALL_TENSORS, ALLOCATED, RESERVED, DEVICE_USED, HOST) and a.side.on_gpu != b.side.on_gpu:
        why = _OTHER_KERNELS
    elif name == DEVICE_USED and a.side.source != b.side.source:
        why = "other processes are not simulated"
    return _build_total(name, a_bytes, b_bytes, tolerance, why)


def _build_total(
    name: str, a_bytes: int | None, b_bytes: int | None, tolerance: Tolerance, why_not: str
) -> comparison.TotalRow:
    within = None if why_not else tolerance.allows(a_bytes or 0, b_bytes or 0)
    return comparison.TotalRow(name, a_bytes, b_bytes, _subtract(a_bytes, b_bytes), not why_not, within, why_not)


def _compare_ranks(a: ComparedRun, b: ComparedRun, tolerance: Tolerance) -> Iterator[comparison.TotalRow]:
    """Yield the allocated peak of each rank; ranks with the same bytes share a row."""
    pairs: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in sorted(a.ranks.keys() | b.ranks.keys()):
        pairs.setdefault((a.ranks.get(rank), b.ranks.get(rank)), []).append(rank)
    for (a_bytes, b_bytes), ranks in pairs.items():
        why = "" if a_bytes is not None and b_bytes is not None else "not run in both"
        if a.side.on_gpu != b.side.on_gpu:
            why = _OTHER_KERNELS
        name = f"{ALLOCATED}, rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"
        yield _build_total(name, a_bytes, b_bytes, tolerance, why)


def _compare_stages(a: ComparedRun, b: ComparedRun) -> tuple[comparison.StageRow, ...]:
    rows = []
    for order, key in enumerate(_merge_keys(list(a.stages), list(b.stages))):
        a_stage, b_stage = a.stages.get(key), b.stages.get(key)
        known = b_stage if a_stage is None or (b_stage is not None and b_stage.stack) else a_stage
        assert known is not None
        difference, status = None, comparison.ONLY_IN_B if a_stage is None else comparison.ONLY_IN_A
        if a_stage is not None and b_stage is not None:
            difference = b_stage.peak_allocated_bytes - a_stage.peak_allocated_bytes
            is_same = all(getattr(a_stage, name) == getattr(b_stage, name) for name in _STAGE_AMOUNTS)
            status = comparison.SAME if is_same else comparison.DIFFERS
        where = (order, *key[:2], known.micro_batch, known.stack, known.index)
        rows.append(comparison.StageRow(*where, status, _build_amounts(a_stage), _build_amounts(b_stage), difference))
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_bytes or 0), row.order)))


def _build_amounts(stage: Stage | None) -> comparison.StageBytes | None:
    names = [field.name for field in dataclasses.fields(comparison.StageBytes)]
    return None if stage is None else comparison.StageBytes(**{name: getattr(stage, name) for name in names})


def _merge_keys(a: list[StageKey], b: list[StageKey]) -> list[StageKey]:
    """Return both lists merged, each in its own order; keys only in `b` follow their predecessor in `b`."""
    known = set(a)
    following: dict[StageKey | None, list[StageKey]] = defaultdict(list)
    last: StageKey | None = None
    for key in b:
        if key in known:
            last = key
        else:
            following[last].append(key)
    merged = list(following[None])
    for key in a:
        merged += [key, *following[key]]
    return merged


def _compare_categories(a: dict[str, int], b: dict[str, int]) -> tuple[comparison.CategoryRow, ...]:
    sizes = ((name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b]))
    rows = [comparison.CategoryRow(name, a_bytes, b_bytes, b_bytes - a_bytes) for name, a_bytes, b_bytes in sizes]
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_bytes), -max(row.a_bytes, row.b_bytes))))


def _sum_kernels(run: ComparedRun) -> comparison.KernelMemory:
    own = [row for row in run.tensors if row.category == KERNELS]
    return comparison.KernelMemory(
        kind="CUDA kernels" if run.side.on_gpu else "CPU kernels",
        num_bytes=sum(one.total_bytes for one in own),
        tensors=tuple(sorted(own, key=lambda one: -one.total_bytes)),
    )


def _sum_seconds(run: ComparedRun) -> float | None:
    measured = [stage.seconds for stage in run.stages.values() if stage.seconds is not None]
    return sum(measured) if measured else None


def _compare_findings(
    a: dict[str, int | None] | None, b: dict[str, int | None] | None
) -> tuple[comparison.FindingRow, ...] | None:
    if a is None or b is None:
        return None
    rows = [
        comparison.FindingRow(name, name in a, name in b, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])
    ]
    differing = [row for row in rows if row.in_a != row.in_b or row.a_bytes != row.b_bytes]
    return tuple(sorted(differing, key=lambda row: -abs((row.b_bytes or 0) - (row.a_bytes or 0))))
