"""Ways to spread a training over GPUs: what each needs by the closed form, and the least time that its step takes.

The closed form says in what order ways are worth a run, and which are not; what is answered was run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.estimate.geometry import DecoderGeometry, Subject
from memprof.estimate.table import highest_cell
from memprof.flows.recommend.closed_form import estimated
from memprof.flows.recommend.plans import Activations, Goal, Plan
from memprof.spec import TargetSpec
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a goal over GPUs."""

    plan: Plan
    parallel: str  # as `--parallel` has it; empty: one GPU
    spread: ParallelPlan  # `parallel`, parsed
    micro_batch: int  # sequences that a rank has at a time
    accumulation: int  # micro-batches of a rank in an optimizer step
    estimated_bytes: int | None  # of the fullest GPU, context included; None: the closed form does not know the model
    estimated_seconds: float  # of a step, at the least

    def label(self) -> str:
        """Return what it is, in a line of a table."""
        name = self.plan.label(self.micro_batch)
        return f"{self.parallel}: {name}" if self.parallel else name

    def spec(self, base: TargetSpec) -> TargetSpec:
        """Return the run of it."""
        made = self.plan.spec(base, self.micro_batch, self.accumulation)
        return made.edit(parallel=self.parallel, gpus=self.spread.size) if self.spread.size > 1 else made


def plans_over(gpus: int) -> list[str]:
    """Return how a model is spread over so many GPUs, the simplest first; those that code to paste is written for."""
    if gpus == 1:
        return [""]
    found = ["ddp", "fsdp", "fsdp:shard_grad_op"]
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    found += [f"hsdp:{gpus // shards}x{shards}" for shards in powers if shards < gpus]
    found += [f"tp={ranks},fsdp={gpus // ranks}" for ranks in powers if ranks < gpus]
    return [*found, *([f"tp={gpus}"] if gpus in powers else [])]


def ways_of(tier: Plan, base: TargetSpec, subject: Subject | None, gpu: Gpu, gpus: int, batch: int) -> list[Way]:
    """Return every way of a kind of runs over so many GPUs, the quickest first; a step has `batch` sequences in all."""
    from memprof.workload.models import find_source

    source, found = find_source(base), list[Way]()
    for parallel in plans_over(gpus):
        spread = parse_plan(parallel, gpus) if parallel else ParallelPlan()
        if batch % spread.data:
            continue
        asked = tier.spec(base, 1).edit(parallel=parallel or None, gpus=gpus)
        try:
            check_plan(spread, asked, source.task, source.config)
        except UsageError:
            continue
        each = batch // spread.data
        kinds = itertools.product((Activations.KEPT, Activations.CHECKPOINTED), (False, True))
        for activations, chunked in kinds:
            if chunked and spread.tensor > 1:
                continue  # the fix needs a head that is whole
            plan = replace(tier, activations=activations, chunked_loss=chunked)
            for size in (size for size in range(1, each + 1) if each % size == 0):
                found.append(_way(plan, parallel, spread, size, each // size, base, subject, gpu))
    return sorted(found, key=lambda way: way.estimated_seconds)


def _way(
    plan: Plan,
    parallel: str,
    spread: ParallelPlan,
    size: int,
    times: int,
    base: TargetSpec,
    subject: Subject | None,
    gpu: Gpu,
) -> Way:
    if subject is None or subject.geometry is None or base.context_length is None:
        lean = (plan.activations is not Activations.KEPT) + plan.chunked_loss
        return Way(plan, parallel, spread, size, times, None, lean + 1 / size)
    cell = highest_cell(subject, estimated(plan, base), size, base.context_length, parallel, spread.size)
    seconds = _seconds(subject.geometry, plan, spread, size * base.context_length, times, base.context_length, gpu)
    return Way(plan, parallel, spread, size, times, cell.allocated_bytes + gpu.context_bytes, seconds)


def _seconds(
    g: DecoderGeometry, plan: Plan, spread: ParallelPlan, tokens: int, times: int, context: int, gpu: Gpu
) -> float:
    """Return the least time of a step: products at the GPU's rate, and what is sent, over its links.

    Products take 2 operations for a parameter and a token forward, 4 backward (2 where the weights are frozen), and 2
    more where they are computed again. Megatron's tensor parallelism sums the hidden states four times in a layer
    (Shoeybi et al., 2019, section 3); fully_shard gathers the parameters twice and scatters their gradients, in every
    micro-batch; DistributedDataParallel sums gradients once.
    """
    weights = g.num_parameters - (0 if g.tied else g.vocab * g.hidden)
    again = plan.activations is Activations.CHECKPOINTED
    passes = (2 if plan.goal is Goal.LORA else 3) + again
    attention = 4 * g.layers * g.attention_width * context / 2
    operations = passes * (2 * weights + attention) * tokens / spread.tensor
    rate = gpu.peak_flops.get("float32" if plan.precision == "float32" else plan.half) or max(gpu.peak_flops.values())
    item = 4 if plan.precision == "float32" else 2
    trained = 0 if plan.goal is Goal.LORA else g.num_parameters
    reduced = trained * (item if plan.precision == "half" else 4) / spread.tensor
    sent = 0.0
    if spread.sharded:
        gathered = (2 if spread.reshard else 1) * g.num_parameters * item / spread.tensor
        sent += (spread.shard - 1) / spread.shard * (gathered + reduced)
        sent += 2 * (spread.replicate - 1) / spread.replicate * reduced / spread.shard
    if spread.tensor > 1:
        sums = (4 + 2 * again) * g.layers * tokens * g.hidden * item
        sent += 2 * (spread.tensor - 1) / spread.tensor * sums
    sent *= times
    if not spread.sharded and spread.data > 1:
        sent += 2 * (spread.data - 1) / spread.data * reduced
    return times * operations / rate + sent / gpu.link_bandwidth
