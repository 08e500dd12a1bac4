"""Fixes low-rank-npt (no weight delta is computed) and cpu-offload-npt-delta (the delta is kept in host memory)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import ALL_TIERS, Fix, Numerics
from memprof.fixes.offload_activations import Offloaded
from memprof.workload.npt import NptComponent


@Fix(
    name="low-rank-npt", order=130, numerics=Numerics.EXACT, saves=("activations", "temporaries"),
    changes="compute NPT components without a weight delta: h W + ((h A) * m) B",
    cost="none: it is faster",
    for_models="npt",
    conflicts={"cpu-offload-npt-delta": "without a delta there is nothing to offload"},
    edit="memprof.fixes.spec_edits:set_low_rank_npt", detect=lambda spec: spec.npt == "low-rank",
    ladder_order=30, search_order=20, tiers=ALL_TIERS,
    helps={"weight-delta-per-token": 10, "doctor: weight delta": 10},
)  # fmt: skip
def install_low_rank(model: nn.Module, changes: Changes) -> None:
    """Switch all NPT components to mode low-rank; raise UsageError if there are none, or all have this mode."""
    components = _find_components(model, changes)
    changed = [component for component in components if component.mode != "low-rank"]
    if not changed:
        raise changes.already_on(f"{len(components)} components in mode low-rank")
    modes = ", ".join(sorted({component.mode for component in changed}))
    for component in changed:
        changes.set_attribute(component, "mode", "low-rank")
    changes.note(f"{len(changed)} NPT components: {modes} became low-rank")


@Fix(
    name="cpu-offload-npt-delta", order=180, numerics=Numerics.EXACT, saves=("activations",),
    changes="move the weight delta of an NPT component to host memory between forward and backward",
    cost="every delta crosses the bus twice in a step; one is still on the GPU at a time",
    for_models="npt",
    conflicts={"activation-checkpointing": "layers that run again keep no delta"}, ladder_order=40, moves_to_host=True,
)  # fmt: skip
def install_offload(model: nn.Module, changes: Changes) -> None:
    """Keep the weight delta of every NPT component in host memory between forward and backward. Raises UsageError if
    the model has no components, or one that is not in mode dense and so saves no delta."""
    components = _find_components(model, changes)
    for component in components:
        if component.mode != "dense":
            reason, hint = "no delta is kept between forward and backward", "it is for components in mode dense"
            raise changes.does_not_apply(reason, f"mode {component.mode}", hint)
    for component in components:
        changes.set_attribute(component, "forward", _DeltaOffloadingForward(component))
    changes.note(f"the weight deltas of {len(components)} NPT components wait in host memory")


def _find_components(model: nn.Module, changes: Changes) -> list[NptComponent]:
    components = [module for module in model.modules() if isinstance(module, NptComponent)]
    if not components:
        hint = "components are those of memprof.workload.npt, put there by add_npt or --npt"
        raise changes.does_not_apply("the model has no NPT component", model, hint)
    return components


class _DeltaOffloadingForward(Offloaded):
    """Replaced forward of an NPT component, whose saved weight delta is moved to host memory."""

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        states = hidden[0] if isinstance(hidden, (tuple, list)) else hidden
        # [tokens x d_model x d_ffn]: all other saved tensors are smaller.
        self._delta_elements = states.numel() * self._module.d_ffn
        return super().__call__(hidden, *args, **kwargs)

    def _stays_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() < self._delta_elements
