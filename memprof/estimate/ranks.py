"""What one rank of several has of a model, of a batch and of a step: the closed form of `--parallel`'s plans."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memprof.estimate.geometry import Geometry
from memprof.workload.plan import Plan as Spread


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's place; the default is a card alone."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1  # Over how many ranks each part of the state is spread.
    replicas: int = 1  # Ranks that reduce their gradients together.
    gathers: bool = False  # fully_shard: what computes is whole for as long as it computes.
    reshard: bool = True  # And is given back after the forward.
    tensor: int = 1  # Ranks that share each matrix.
    context: int = 1
    ulysses: int = 1  # Ranks that share a sequence; with the second each has a part of the heads in attention.
    stages: int = 1
    stage: int = 0  # Of a pipeline, from 0.
    in_flight: int = 1  # Micro-batches whose activations are there at once.
    microbatches: int = 1  # Of a pipeline's step.

    @property
    def sequence(self) -> int:
        """Ranks that share a sequence."""
        return self.context * self.ulysses

    @property
    def is_first(self) -> bool:
        """It has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """It has the head, and the loss."""
        return self.stage == self.stages - 1

    def layers(self, g: Geometry) -> int:
        """Of this stage: the first stages have one more, where they cannot be divided."""
        each, more = divmod(g.layers, self.stages)
        return each + (self.stage < more)

    def geometry(self, g: Geometry) -> Geometry:
        """A layer of which each matrix is divided."""
        if self.tensor == 1:
            return g
        t = self.tensor
        return dataclasses.replace(g, heads=g.heads // t, kv_heads=g.kv_heads // t, intermediate=g.intermediate // t)

    def elements(self, g: Geometry) -> Elements:
        """Parameters that this rank computes with, whole."""
        layers = self.layers(g)
        embedding = g.vocab * g.hidden
        # A tied matrix is two where it is on two stages, or divided among ranks.
        has_head = self.is_last and (not g.tied or self.stages > 1 or self.tensor > 1)
        final = g.hidden * (2 if g.norm == "layer" else 1)
        of_norms = (g.norm_parameters - final) // g.layers
        return Elements(
            layer=g.linear_parameters // g.layers // self.tensor + of_norms,
            layers=layers,
            embedding=(embedding // self.tensor + g.positions * g.hidden) * self.is_first,
            head=(embedding // self.tensor + g.vocab * g.head_bias) * has_head,
            final=final * self.is_last,
            undivided=(embedding - embedding // self.tensor) * self.is_first,
        )


@dataclass(frozen=True, slots=True)
class Elements:
    """Numbers of parameters."""

    layer: int
    layers: int
    embedding: int
    head: int  # 0 where it is the embedding's matrix.
    final: int  # The last norm.
    undivided: int  # The gradient of an embedding whose rows are divided is of all rows.

    @property
    def root(self) -> int:
        """What is in no layer."""
        return self.embedding + self.head + self.final

    @property
    def all(self) -> int:
        """All of them."""
        return self.layer * self.layers + self.root


ALONE = Rank()


def rank_of(plan: Spread, stage: int = 0) -> Rank:
    """Any rank of a plan, or of its `stage`."""
    shards = plan.shard * plan.sequence if plan.sharded else 1
    in_flight = plan.microbatches
    if plan.schedule == "1f1b":
        in_flight = min(plan.stages - stage, plan.microbatches)
    return Rank(
        parameters=shards,
        gradients=shards,
        optimizer=shards,
        replicas=plan.data * plan.sequence,
        gathers=plan.sharded,
        reshard=plan.reshard,
        tensor=plan.tensor,
        context=plan.context,
        ulysses=plan.ulysses,
        stages=plan.stages,
        stage=stage,
        in_flight=in_flight if plan.stages > 1 else 1,
        microbatches=plan.microbatches,
    )


def ranks_of(plan: Spread) -> list[Rank]:
    """One of each kind."""
    return [rank_of(plan, stage) for stage in range(plan.stages)]
