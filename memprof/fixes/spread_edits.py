"""Edits of the plan: the steps of `--fix` and `--ladder` that spread a run over more of its GPUs.

Each takes the spec, the step, the value of its main option and the target, as the edits of spec_edits.py do.

Raises:
    UsageError: there is one GPU, no GPUs are left to share, or the model cannot be spread so.
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

# Which direction of the plan each step is.
_SHARED: Final = {"ulysses": "ulysses", "ring-attention": "context", "tensor-parallel": "tensor"}


def shard(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Turn the plan's replicas into shards."""
    plan = _plan(spec, fix)
    return _checked(spec, dataclasses.replace(plan, sharded=True, shard=plan.data, replicate=1))


def share(spec: TargetSpec, fix: Fix, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """Have GPUs that had sequences of their own share them: so many, or as many as the model allows."""
    plan = _plan(spec, fix)
    sizes = [ranks for ranks in range(plan.data, 1, -1) if plan.data % ranks == 0]
    if not sizes:
        raise useless(fix, f"--parallel {spec.parallel}", "no GPUs are left that have sequences of their own")
    if value is not None and value not in sizes:
        raise useless(fix, value, f"give one of {', '.join(map(str, sizes))}")
    refused: UsageError | None = None
    for shared in _shares(plan, _SHARED[fix.name], sizes if value is None else [value]):
        try:
            return _checked(spec, shared)
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _plan(spec: TargetSpec, fix: Fix) -> ParallelPlan:
    if spec.gpus == 1:
        raise useless(fix, "one GPU", "it is for several: add --gpus 2")
    plan = parse_plan(spec.parallel or BESIDE, spec.gpus)
    if plan.layers > 1:
        raise useless(fix, f"--parallel {spec.parallel}", "one process has all GPUs")
    return plan


def _shares(plan: ParallelPlan, direction: str, sizes: list[int]) -> Iterator[ParallelPlan]:
    for ranks in sizes:
        left = plan.data // ranks
        # torch has no replicas of tensor-parallel parameters: what is left are shards.
        sharded = plan.sharded or (direction == "tensor" and left > 1)
        made = dataclasses.replace(
            plan, sharded=sharded, shard=left if sharded else 1, replicate=1 if sharded else left
        )
        changed: dict[str, Any] = {direction: ranks}
        yield dataclasses.replace(made, **changed)


def _checked(spec: TargetSpec, plan: ParallelPlan) -> TargetSpec:
    source = find_source(spec)
    edited = spec.edit(parallel=plan.text())
    check_plan(plan, edited, source.task, source.config)
    return edited
