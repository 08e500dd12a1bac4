"""Interface of the device that a workload runs on: a virtual GPU or a measured device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from memprof.trace.events import Owner, PhaseKind


class Device(Protocol):
    """Device that records the phases, models and tensors of a workload."""

    name: str  # torch's name of the device: "cuda" or "cpu"

    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> AbstractContextManager[None]:
        """Return a context manager whose body runs as this phase."""

    def adopt(self, root: nn.Module) -> None:
        """Record `root` as a model of this run."""

    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Give `tensor` the role and name of `owner`."""

    def assume(self, sentence: str) -> None:
        """Add an assumption of the run."""
