"""Fixes low-rank-npt (NPT components without full weight deltas) and cpu-offload-npt-delta (delta in host memory)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import EVERY_TIER, Fix, Numerics
from memprof.fixes.offload_activations import Offloaded
from memprof.workload.npt import NptComponent


@Fix(
    name="low-rank-npt", order=130, numerics=Numerics.EXACT, saves=("activations", "temporaries"),
    changes="NPT components never make a weight delta: h W + ((h A) * m) B",
    cost="none: it is faster",
    for_models="npt",
    conflicts={"cpu-offload-npt-delta": "without a delta there is nothing to offload"},
    edit="memprof.fixes.spec_edits:low_rank_npt", on=lambda spec: spec.npt == "low-rank",
    ladder=30, search=20, tiers=EVERY_TIER, helps={"weight-delta-per-token": 10, "doctor: weight delta": 10},
)  # fmt: skip
def install_low_rank(model: nn.Module, changes: Changes) -> None:
    """Switch all components to mode low-rank. Raises UsageError: there are no components, or all have this mode."""
    components = _find_components(model, changes)
    chosen = [component for component in components if component.mode != "low-rank"]
    if not chosen:
        raise changes.already_on(f"{len(components)} components in mode low-rank")
    modes = ", ".join(sorted({component.mode for component in chosen}))
    for component in chosen:
        changes.set_attribute(component, "mode", "low-rank")
    changes.note(f"{len(chosen)} NPT components: {modes} became low-rank")


@Fix(
    name="cpu-offload-npt-delta", order=180, numerics=Numerics.EXACT, saves=("activations",),
    changes="the weight delta of an NPT component waits in host memory between forward and backward",
    cost="every delta crosses the bus twice in a step; one is still on the GPU at a time",
    for_models="npt",
    conflicts={"activation-checkpointing": "layers that run again keep no delta"}, ladder=40,
)  # fmt: skip
def install_offload(model: nn.Module, changes: Changes) -> None:
    """Keep the delta of every dense component in host memory between forward and backward. Raises UsageError: the model
    has no components, or a component in another mode, which keeps no delta."""
    components = _find_components(model, changes)
    for component in components:
        if component.mode != "dense":
            why, hint = "no delta is kept between forward and backward", "it is for components in mode dense"
            raise changes.does_not_apply(why, f"mode {component.mode}", hint)
    for component in components:
        changes.set_attribute(component, "forward", _DeltaOffloadingForward(component))
    changes.note(f"the weight deltas of {len(components)} NPT components wait in host memory")


def _find_components(model: nn.Module, changes: Changes) -> list[NptComponent]:
    found = [module for module in model.modules() if isinstance(module, NptComponent)]
    if not found:
        hint = "components are those of memprof.workload.npt, put there by add_npt or --npt"
        raise changes.does_not_apply("the model has no NPT component", model, hint)
    return found


class _DeltaOffloadingForward(Offloaded):
    """The forward of a component, whose saved tensors of at least the delta's size are moved to host memory."""

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        states = hidden[0] if isinstance(hidden, (tuple, list)) else hidden
        # [tokens x d_model x d_ffn]: all other saved tensors are smaller.
        self._delta_elements = states.numel() * self._module.d_ffn
        return super().__call__(hidden, *args, **kwargs)

    def _stays_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() < self._delta_elements
