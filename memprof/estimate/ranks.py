"""The part of the model, batch and optimizer state that one rank holds under a plan of `--parallel`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.estimate.geometry import DecoderGeometry, EstimatedModel
from memprof.estimate.methods import MethodPlan
from memprof.spec import TargetSpec
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a parallel plan: over how many ranks each part of the state is divided; by default a single GPU."""

    # Numbers of ranks over which parameters, gradients and optimizer state are sharded.
    param_shards: int = 1
    grad_shards: int = 1
    state_shards: int = 1
    replicas: int = 1  # Ranks that all-reduce their gradients.
    gathers: bool = False  # fully_shard: parameters are gathered for the layers that compute.
    reshard: bool = True  # Gathered parameters are released after the forward.
    tensor: int = 1  # Ranks that share each matrix.
    context: int = 1  # Ranks that share a sequence, with all heads each.
    ulysses: int = 1  # Ranks that share a sequence, with some heads each during attention.
    stages: int = 1  # Pipeline stages.
    stage: int = 0  # Index of the rank's pipeline stage.
    in_flight: int = 1  # Micro-batches whose activations are live at the same time.
    microbatches: int = 1  # Micro-batches of a step of the pipeline.

    @property
    def sequence(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.context * self.ulysses

    @property
    def is_first(self) -> bool:
        """Return whether the rank is in the first pipeline stage, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether the rank is in the last pipeline stage, which has the head and the loss."""
        return self.stage == self.stages - 1

    def count_layers(self, g: DecoderGeometry) -> int:
        """Return the number of layers of the rank's pipeline stage; a remainder goes to the first stages."""
        min_layers, num_extra = divmod(g.layers, self.stages)
        return min_layers + (self.stage < num_extra)

    def shard_geometry(self, g: DecoderGeometry) -> DecoderGeometry:
        """Return the shape of the model with each matrix divided among the tensor-parallel ranks."""
        if self.tensor == 1:
            return g
        t = self.tensor
        return dataclasses.replace(g, heads=g.heads // t, kv_heads=g.kv_heads // t, intermediate=g.intermediate // t)

    def count_elements(self, g: DecoderGeometry) -> Elements:
        """Return the numbers of parameters that the rank computes with, before sharding."""
        num_layers = self.count_layers(g)
        embedding = g.vocab * g.hidden
        # A tied matrix is stored twice if embedding and head are on two stages, or if it is divided among ranks.
        has_head = self.is_last and (not g.tied or self.stages > 1 or self.tensor > 1)
        final_norm = g.hidden * (2 if g.norm == "layer" else 1)
        layer_norms = (g.norm_parameters - final_norm) // g.layers
        return Elements(
            layer=g.linear_parameters // g.layers // self.tensor + layer_norms,
            num_layers=num_layers,
            embedding=(embedding // self.tensor + g.num_positions * g.hidden) * self.is_first,
            head=(embedding // self.tensor + g.vocab * g.has_head_bias) * has_head,
            final_norm=final_norm * self.is_last,
            undivided=(embedding - embedding // self.tensor) * self.is_first,
        )


@dataclass(frozen=True, slots=True)
class Elements:
    """The numbers of parameters that a rank has in each part of the model, in elements."""

    layer: int
    num_layers: int
    embedding: int
    head: int  # 0 if tied to the embedding.
    final_norm: int
    undivided: int  # Extra elements of the embedding's gradient, which has all rows though the rows are divided.

    @property
    def root(self) -> int:
        """Return the number of parameters outside layers."""
        return self.embedding + self.head + self.final_norm

    @property
    def total(self) -> int:
        """Return the number of parameters in all parts."""
        return self.layer * self.num_layers + self.root


SINGLE_GPU = Rank()


def build_rank(plan: ParallelPlan, stage: int = 0) -> Rank:
    """Return a rank of the plan, in the pipeline stage with index `stage`."""
    shards = plan.shard * plan.sequence if plan.sharded else 1
    in_flight = min(plan.stages - stage, plan.microbatches) if plan.schedule == "1f1b" else plan.microbatches
    return Rank(
        param_shards=shards, grad_shards=shards, state_shards=shards, replicas=plan.data * plan.sequence,
        gathers=plan.sharded, reshard=plan.reshard, tensor=plan.tensor, context=plan.context, ulysses=plan.ulysses,
        stages=plan.stages, stage=stage, in_flight=in_flight, microbatches=plan.microbatches,
    )  # fmt: skip


def list_ranks(subject: EstimatedModel, plan: MethodPlan, parallel: str, gpus: int) -> list[Rank]:
    """Return one rank of each pipeline stage, for the plan `parallel` (such as "tp=4") over `gpus` GPUs; "": one GPU.
    Raises UsageError: `parallel` is not a plan, or the model does not support it."""
    if not parallel:
        return [SINGLE_GPU]
    layout = parse_plan(parallel, gpus)
    if layout.layers > 1:
        hint = "memprof profile --mode inference runs it"
        raise UsageError("the closed form has no layers over GPUs", value=f"--parallel {parallel}", hint=hint)
    fields = plan.build_spec_fields()
    spec_fields = {name: fields[name] for name in ("mode", "adapter", "quantize") if name in fields}
    spec = TargetSpec(model="-", parallel=parallel, **spec_fields)  # type: ignore[arg-type]
    check_plan(layout, spec, "causal-lm", subject.config)
    if plan.chunked_loss and (layout.tensor > 1 or layout.stages > 1):
        problem = "a chunked loss needs a head that is whole, and none that a schedule calls"
        hint = "leave out --chunked-loss, or give fsdp, cp or ulysses"
        raise UsageError(problem, value=f"--parallel {parallel}", hint=hint)
    return [build_rank(layout, stage) for stage in range(layout.stages)]
