"""low-rank-npt and cpu-offload-npt-delta: the weight delta of NPT components never made, or kept in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.remedies.applied import Changes
from memprof.remedies.offload_activations import Offloaded
from memprof.workload.npt import NptComponent


def install_low_rank(model: nn.Module, changes: Changes) -> None:
    """Switch every component to the form that makes no delta.

    Raises:
        UsageError: there are none, or all have that form already.
    """
    components = _components(model, changes.remedy)
    chosen = [component for component in components if component.mode != "low-rank"]
    if not chosen:
        raise UsageError("low-rank-npt is already on", value=f"{len(components)} components in mode low-rank")
    modes = ", ".join(sorted({component.mode for component in chosen}))
    for component in chosen:
        changes.set_attribute(component, "mode", "low-rank")
    changes.note(f"{len(chosen)} NPT components: {modes} became low-rank")


def install_offload(model: nn.Module, changes: Changes) -> None:
    """Keep the delta of every dense component in host memory between its forward and its backward.

    Raises:
        UsageError: there are no components, or one in another mode, which keeps no delta.
    """
    components = _components(model, changes.remedy)
    for component in components:
        if component.mode != "dense":
            raise UsageError(
                "cpu-offload-npt-delta does not apply: no delta is kept between forward and backward",
                value=f"mode {component.mode}",
                hint="it is for components in mode dense",
            )
    for component in components:
        changes.set_attribute(component, "forward", _DeltaOffloaded(component))
    changes.note(f"the weight deltas of {len(components)} NPT components wait in host memory")


def _components(model: nn.Module, remedy: str) -> list[NptComponent]:
    found = [module for module in model.modules() if isinstance(module, NptComponent)]
    if not found:
        raise UsageError(
            f"{remedy} does not apply: the model has no NPT component",
            value=type(model).__name__,
            hint="components are those of memprof.workload.npt, put there by add_npt or --npt",
        )
    return found


class _DeltaOffloaded(Offloaded):
    """The forward of a component; of what autograd saves, tensors as large as the delta go to host memory."""

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        states = hidden[0] if isinstance(hidden, (tuple, list)) else hidden
        # [tokens x d_model x d_ffn]: nothing else that is saved is as large.
        self._numbers = states.numel() * self._module.d_ffn
        return super().__call__(hidden, *args, **kwargs)

    def _stays(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() < self._numbers
