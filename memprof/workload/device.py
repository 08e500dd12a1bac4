"""The device that a workload runs on, be it a virtual GPU or a measuring one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from memprof.trace.events import Owner, PhaseKind


class Device(Protocol):
    """A device that is told what is being done on it."""

    name: str  # where its tensors are, for torch: "cuda" or "cpu"

    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> AbstractContextManager[None]:
        """Return a context in which what runs is this phase."""

    def adopt(self, root: nn.Module) -> None:
        """Take `root` as the model of this run."""

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Give `tensor` this role."""

    def assume(self, sentence: str) -> None:
        """Note what the run rests on."""
