"""Functions that edit the parallel plan (`--parallel`) for the fixes fsdp, ulysses, ring-attention and tensor-parallel.

Their parameters are those of spec_edits.py. They raise UsageError if the run has one GPU, no data-parallel GPUs are
left, or the model does not support the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from memprof.errors import UsageError
from memprof.fixes.catalog import BASE_PLAN, Fix
from memprof.fixes.spec_edits import make_error
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan

# The field of `ParallelPlan` that each fix sets.
_PLAN_FIELDS: Final = {"ulysses": "ulysses", "ring-attention": "context", "tensor-parallel": "tensor"}


def shard_replicas(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Return `spec` with fully sharded parameters over the ranks that were replicas."""
    plan = _parse_base_plan(spec, fix)
    return _edit_plan(spec, dataclasses.replace(plan, sharded=True, shard=plan.data, replicate=1))


def share_replicas(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Return `spec` with `value` data-parallel GPUs turned into GPUs that share each sequence or matrix.
    If `value` is None, as many as the model allows."""
    plan = _parse_base_plan(spec, fix)
    sizes = [ranks for ranks in range(plan.data, 1, -1) if plan.data % ranks == 0]
    if not sizes:
        raise make_error(fix, f"--parallel {spec.parallel}", "no GPUs are left that have sequences of their own")
    if value is not None and value not in sizes:
        raise make_error(fix, value, f"give one of {', '.join(map(str, sizes))}")
    first_error: UsageError | None = None
    for candidate in _iter_plans(plan, _PLAN_FIELDS[fix.name], sizes if value is None else [value]):
        try:
            return _edit_plan(spec, candidate)
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _parse_base_plan(spec: TargetSpec, fix: Fix) -> ParallelPlan:
    if spec.gpus == 1:
        raise make_error(fix, "one GPU", "it is for several: add --gpus 2")
    plan = parse_plan(spec.parallel or BASE_PLAN, spec.gpus)
    if plan.layers > 1:
        raise make_error(fix, f"--parallel {spec.parallel}", "one process has all GPUs")
    return plan


def _iter_plans(plan: ParallelPlan, dimension: str, sizes: list[int]) -> Iterator[ParallelPlan]:
    for ranks in sizes:
        data_ranks = plan.data // ranks
        # torch does not replicate tensor-parallel parameters: the data-parallel ranks must have shards.
        sharded = plan.sharded or (dimension == "tensor" and data_ranks > 1)
        base_plan = dataclasses.replace(
            plan, sharded=sharded, shard=data_ranks if sharded else 1, replicate=1 if sharded else data_ranks
        )
        fields: dict[str, Any] = {dimension: ranks}
        yield dataclasses.replace(base_plan, **fields)


def _edit_plan(spec: TargetSpec, plan: ParallelPlan) -> TargetSpec:
    source = find_source(spec)
    edited = spec.edit(parallel=plan.text())
    check_plan(plan, edited, source.task, source.config)
    return edited
