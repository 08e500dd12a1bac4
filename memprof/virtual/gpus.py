"""The GPUs of a run: their number and names, the current GPU of each thread, the GPU of each autograd node."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memprof.errors import UsageError
from memprof.torch_private import autograd
from memprof.trace.events import HOST, is_gpu

_MAX_GPUS = 120  # C10_COMPILE_TIME_MAX_GPUS (c10/cuda/CUDAMacros.h): torch counts no further on Linux
# c10/cuda/CUDAException.cpp.
_NO_SUCH_GPU = "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"


class _CurrentGpu(threading.local):
    """The current GPU of one thread: the first GPU, unless the thread selects another."""

    gpu = 0


class Gpus:
    """The equal GPUs of one process. With one GPU, every index means this GPU.

    Args:
        num_gpus: the number of GPUs.
        device_type: torch's type of the devices: "cuda", "mps" or "xpu".
        is_used_by_device: device -> whether the program has used the GPU, other than by a tensor; updated here.
        are_peers: whether the GPUs read each other's memory.

    Raises:
        UsageError: the number exceeds torch's maximum, which is one for "mps".
    """

    def __init__(
        self, num_gpus: int, device_type: str, is_used_by_device: dict[str, bool], *, are_peers: bool = False
    ) -> None:
        if num_gpus > _MAX_GPUS:
            hint = f"at most {_MAX_GPUS} on a machine; --nodes says how many machines, world_size how many ranks"
            raise UsageError("torch takes fewer GPUs of one machine", value=f"{num_gpus:,} GPUs", hint=hint)
        if device_type == "mps" and num_gpus > 1:
            raise UsageError("torch has one MPS device", value=f"{num_gpus} GPUs", hint="leave out --gpus")
        self.num_gpus = num_gpus
        self.has_several = num_gpus > 1
        self.are_peers = are_peers
        self._current = _CurrentGpu()
        self.type = device_type
        self.devices = tuple(f"{device_type}:{index}" for index in range(num_gpus))
        self.first = self.devices[0]
        self._is_used_by_device = is_used_by_device
        if self.has_several:
            is_used_by_device.update(dict.fromkeys(self.devices, False))

    @property
    def current(self) -> int:
        """Return the index of the current GPU of this thread."""
        return self._current.gpu

    def index(self, device: Any = None) -> int:
        """Return the index of the GPU `device`; the current GPU's if `device` has no index.

        Raises:
            RuntimeError: the GPU does not exist.
        """
        if not self.has_several:
            return 0
        if not isinstance(device, int):
            named = torch.device(device) if isinstance(device, str) else getattr(device, "device", device)
            # `torch.cuda.device(1)` has an `idx`.
            device = None if named is None else named.idx if hasattr(named, "idx") else named.index
        if device is None or device < 0:
            return self.current
        if device >= self.num_gpus:
            raise getattr(torch, "AcceleratorError", RuntimeError)(_NO_SUCH_GPU)
        return int(device)

    def get_name(self, device: Any = None) -> str:
        """Return the name of the GPU `device`, such as "cuda:0"."""
        return self.devices[self.index(device)] if self.has_several else self.first

    def mark_used(self, device: Any = None) -> int:
        """Return the index of the GPU `device`, and mark the GPU as used: it has a CUDA context from now on."""
        index = self.index(device)
        if self.has_several:
            self._is_used_by_device[self.devices[index]] = True
        return index

    def select(self, device: Any) -> int:
        """Make `device` the current GPU, unless its index is negative; return the index of the previous current GPU."""
        previous, index = self.current, self.index(device)
        if index != previous:
            self._current.gpu = self.mark_used(index)
        return previous


class AutogradNodes:
    """Table of the GPU on which each autograd node was created, and of the nodes that copy virtual host tensors.

    Nodes are identified by their sequence numbers. C++ would know the GPU from the devices of the node's tensors.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._gpu_of: dict[int, str] = {}
        self._host_copies: set[int] = set()

    def note_gpu(self, gpu: str) -> None:
        """Record `gpu` as the GPU of the autograd node that the running operator may have."""
        if is_gpu(gpu):
            self._gpu_of[autograd.get_sequence_nr() - 1] = gpu

    def get_current_gpu(self) -> str:
        """Return the GPU on which C++ creates a tensor without inputs: in a backward pass the running node's GPU, else
        the current GPU."""
        node = autograd.current_autograd_node()
        return self._gpus.get_name() if node is None else self._gpu_of.get(node._sequence_nr(), self._gpus.get_name())

    def note_copy(self, device: str) -> None:
        """Record that the newest autograd node, if any, copies a tensor on `device`."""
        if torch.is_grad_enabled() and device == HOST:
            self._host_copies.add(autograd.get_sequence_nr() - 1)

    def is_host_copy(self) -> bool:
        """Return whether the running autograd node is the copy of a virtual host tensor."""
        node = autograd.current_autograd_node()
        return node is not None and node._sequence_nr() in self._host_copies
