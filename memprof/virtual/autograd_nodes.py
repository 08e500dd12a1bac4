"""Facts about autograd's nodes by their numbers, which C++ would know by the devices of their tensors."""

from __future__ import annotations

import torch

from memprof.torch_private import autograd
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.gpus import Gpus


class AutogradNodes:
    """The GPU on which each node was made, of several, and the nodes of copies of virtual host tensors."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._gpu_of: dict[int, str] = {}
        self._host_copies: set[int] = set()

    def note_gpu(self, gpu: str) -> None:
        """Note that what runs now, on this of several GPUs, has a node as a rule."""
        if is_gpu(gpu):
            self._gpu_of[autograd.get_sequence_nr() - 1] = gpu

    def current_gpu(self) -> str:
        """Return where C++ makes a tensor of no other: in a backward pass on the GPU of the node, else on the current
        one."""
        node = autograd.current_autograd_node()
        return self._gpus.named() if node is None else self._gpu_of.get(node._sequence_nr(), self._gpus.named())

    def note_copy(self, device: str) -> None:
        """Note that the node that was just made, if any, is that of a copy of a tensor on `device`."""
        if torch.is_grad_enabled() and device == HOST:
            self._host_copies.add(autograd.get_sequence_nr() - 1)

    def returns_to_host(self) -> bool:
        """Return whether the node that is running is that of a copy of a virtual host tensor."""
        node = autograd.current_autograd_node()
        return node is not None and node._sequence_nr() in self._host_copies
