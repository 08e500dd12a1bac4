"""Candidate plans for training on several GPUs, with their estimated memory and a lower bound of the step time.

The analytical estimate only selects and sorts the candidates; results come from simulated runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.estimate.geometry import DecoderGeometry, EstimatedModel
from memprof.estimate.table import find_highest_cell
from memprof.flows.recommend.closed_form import make_method_plan
from memprof.flows.recommend.plans import Activations, Goal, Plan
from memprof.spec import TargetSpec
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of the search: a plan spread over GPUs in one way, with estimates of memory and time."""

    plan: Plan
    parallel: str  # argument of `--parallel`; empty: one GPU
    parallel_plan: ParallelPlan  # `parallel`, parsed
    micro_batch: int  # sequences of a rank at a time
    accumulation: int  # micro-batches of a rank in an optimizer step
    estimated_bytes: int | None  # of the GPU with the highest usage, context included; None: unknown to the closed form
    estimated_seconds: float  # lower bound of a step

    def format_label(self) -> str:
        """Return a short description for a row of a table."""
        name = self.plan.format_label(self.micro_batch)
        return f"{self.parallel}: {name}" if self.parallel else name

    def make_spec(self, base: TargetSpec) -> TargetSpec:
        """Return `base` edited to run in this way."""
        made = self.plan.make_spec(base, self.micro_batch, self.accumulation)
        return made.edit(parallel=self.parallel, gpus=self.parallel_plan.size) if self.parallel_plan.size > 1 else made


def list_parallel_plans(gpus: int) -> list[str]:
    """Return the plans (`--parallel`) over `gpus` GPUs for which code to paste exists, the simplest first."""
    if gpus == 1:
        return [""]
    found = ["ddp", "fsdp", "fsdp:shard_grad_op"]
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    found += [f"hsdp:{gpus // shards}x{shards}" for shards in powers if shards < gpus]
    found += [f"tp={ranks},fsdp={gpus // ranks}" for ranks in powers if ranks < gpus]
    return [*found, *([f"tp={gpus}"] if gpus in powers else [])]


def list_candidates(
    tier: Plan, base: TargetSpec, subject: EstimatedModel | None, gpu: Gpu, gpus: int, batch: int
) -> list[Candidate]:
    """Return the candidates for `tier` on `gpus` GPUs, quickest first; a step has `batch` sequences on all GPUs."""
    from memprof.workload.models import find_source

    source, found = find_source(base), list[Candidate]()
    for parallel in list_parallel_plans(gpus):
        spread = parse_plan(parallel, gpus) if parallel else ParallelPlan()
        if batch % spread.data:
            continue
        requested = tier.make_spec(base, 1).edit(parallel=parallel or None, gpus=gpus)
        try:
            check_plan(spread, requested, source.task, source.config)
        except UsageError:
            continue
        rank_batch = batch // spread.data
        kinds = itertools.product((Activations.ON_GPU, Activations.CHECKPOINTED), (False, True))
        for activations, chunked in kinds:
            if chunked and spread.tensor > 1:
                continue  # the fix needs an unsharded head
            plan = replace(tier, activations=activations, chunked_loss=chunked)
            for micro_batch in (
                micro_batch for micro_batch in range(1, rank_batch + 1) if rank_batch % micro_batch == 0
            ):
                found.append(
                    _build_candidate(plan, parallel, spread, micro_batch, rank_batch // micro_batch, base, subject, gpu)
                )
    return sorted(found, key=lambda candidate: candidate.estimated_seconds)


def _build_candidate(
    plan: Plan,
    parallel: str,
    spread: ParallelPlan,
    micro_batch: int,
    num_micro_batches: int,
    base: TargetSpec,
    subject: EstimatedModel | None,
    gpu: Gpu,
) -> Candidate:
    if subject is None or subject.geometry is None or base.context_length is None:
        num_savings = (plan.activations is not Activations.ON_GPU) + plan.chunked_loss
        return Candidate(plan, parallel, spread, micro_batch, num_micro_batches, None, num_savings + 1 / micro_batch)
    cell = find_highest_cell(
        subject, make_method_plan(plan, base), micro_batch, base.context_length, parallel, spread.size
    )
    seconds = _estimate_step_seconds(
        subject.geometry, plan, spread, micro_batch * base.context_length, num_micro_batches, base.context_length, gpu
    )
    return Candidate(
        plan, parallel, spread, micro_batch, num_micro_batches, cell.allocated_bytes + gpu.context_bytes, seconds
    )


def _estimate_step_seconds(
    geometry: DecoderGeometry,
    plan: Plan,
    spread: ParallelPlan,
    tokens: int,
    num_micro_batches: int,
    context: int,
    gpu: Gpu,
) -> float:
    """Return a lower bound of the time of a step: matrix products at peak rate plus communication at link bandwidth.

    Products take 2 operations for a parameter and a token forward, 4 backward (2 where the weights are frozen), and 2
    more with activation checkpointing. Megatron's tensor parallelism sums the hidden states four times in a layer
    (Shoeybi et al., 2019, section 3); fully_shard gathers the parameters twice and scatters their gradients, in every
    micro-batch; DistributedDataParallel sums gradients once.
    """
    weights = geometry.num_parameters - (0 if geometry.tied else geometry.vocab * geometry.hidden)
    recomputes = plan.activations is Activations.CHECKPOINTED
    passes = (2 if plan.goal is Goal.LORA else 3) + recomputes
    attention = 4 * geometry.layers * geometry.attention_width * context / 2
    operations = passes * (2 * weights + attention) * tokens / spread.tensor
    rate = gpu.peak_flops.get("float32" if plan.precision == "float32" else plan.half) or max(gpu.peak_flops.values())
    itemsize = 4 if plan.precision == "float32" else 2
    trained = 0 if plan.goal is Goal.LORA else geometry.num_parameters
    reduced = trained * (itemsize if plan.precision == "half" else 4) / spread.tensor
    sent_bytes = 0.0
    if spread.sharded:
        gathered = (2 if spread.reshard else 1) * geometry.num_parameters * itemsize / spread.tensor
        sent_bytes += (spread.shard - 1) / spread.shard * (gathered + reduced)
        sent_bytes += 2 * (spread.replicate - 1) / spread.replicate * reduced / spread.shard
    if spread.tensor > 1:
        sums = (4 + 2 * recomputes) * geometry.layers * tokens * geometry.hidden * itemsize
        sent_bytes += 2 * (spread.tensor - 1) / spread.tensor * sums
    sent_bytes *= num_micro_batches
    if not spread.sharded and spread.data > 1:
        sent_bytes += 2 * (spread.data - 1) / spread.data * reduced
    return num_micro_batches * operations / rate + sent_bytes / gpu.link_bandwidth
