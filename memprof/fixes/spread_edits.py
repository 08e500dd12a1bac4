"""Functions that edit the parallel plan for the fixes of `--fix` and `--ladder` that spread a run over GPUs.

Each function takes the spec, the fix, the value of the fix's main option and the target, as in spec_edits.py.

Raises:
    UsageError: the run has one GPU, all GPUs share sequences already, or the model does not support the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from memprof.errors import UsageError
from memprof.fixes.catalog import BESIDE, Fix
from memprof.fixes.spec_edits import useless
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan

# The field of `ParallelPlan` that each fix sets.
_PLAN_FIELDS: Final = {"ulysses": "ulysses", "ring-attention": "context", "tensor-parallel": "tensor"}


def shard(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Turn the plan's replicas into shards."""
    plan = _parse_spread(spec, fix)
    return _edit_plan(spec, dataclasses.replace(plan, sharded=True, shard=plan.data, replicate=1))


def share(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Let `value` data-parallel GPUs, or as many as the model allows, share each sequence or matrix."""
    plan = _parse_spread(spec, fix)
    sizes = [ranks for ranks in range(plan.data, 1, -1) if plan.data % ranks == 0]
    if not sizes:
        raise useless(fix, f"--parallel {spec.parallel}", "no GPUs are left that have sequences of their own")
    if value is not None and value not in sizes:
        raise useless(fix, value, f"give one of {', '.join(map(str, sizes))}")
    first_error: UsageError | None = None
    for shared in _iter_plans(plan, _PLAN_FIELDS[fix.name], sizes if value is None else [value]):
        try:
            return _edit_plan(spec, shared)
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _parse_spread(spec: TargetSpec, fix: Fix) -> ParallelPlan:
    if spec.gpus == 1:
        raise useless(fix, "one GPU", "it is for several: add --gpus 2")
    plan = parse_plan(spec.parallel or BESIDE, spec.gpus)
    if plan.layers > 1:
        raise useless(fix, f"--parallel {spec.parallel}", "one process has all GPUs")
    return plan


def _iter_plans(plan: ParallelPlan, direction: str, sizes: list[int]) -> Iterator[ParallelPlan]:
    for ranks in sizes:
        data = plan.data // ranks
        # torch does not replicate tensor-parallel parameters: the data-parallel ranks must have shards.
        sharded = plan.sharded or (direction == "tensor" and data > 1)
        spread = dataclasses.replace(
            plan, sharded=sharded, shard=data if sharded else 1, replicate=1 if sharded else data
        )
        fields: dict[str, Any] = {direction: ranks}
        yield dataclasses.replace(spread, **fields)


def _edit_plan(spec: TargetSpec, plan: ParallelPlan) -> TargetSpec:
    source = find_source(spec)
    edited = spec.edit(parallel=plan.text())
    check_plan(plan, edited, source.task, source.config)
    return edited
