"""The GPUs of a run: how many there are, which of them is current, how the program names them, where nodes ran."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memprof.errors import UsageError
from memprof.torch_private import autograd
from memprof.trace.events import GPU, HOST, is_gpu

_MOST = 120  # C10_COMPILE_TIME_MAX_GPUS (c10/cuda/CUDAMacros.h): torch counts no further on Linux
# c10/cuda/CUDAException.cpp.
_NO_SUCH_GPU = "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"


class _Here(threading.local):
    """The current GPU of one thread: the first, unless it says another."""

    gpu = 0


class Gpus:
    """Equal GPUs of one process. Where there is one, every index means it.

    Args:
        number: of them.
        used: device -> whether the program has used the GPU otherwise than by a tensor; written here.
        are_peers: whether they read each other's memory.

    Raises:
        UsageError: torch sees no machine with so many.
    """

    def __init__(self, number: int, used: dict[str, bool], *, are_peers: bool = False) -> None:
        if number > _MOST:
            hint = f"at most {_MOST} on a machine; --nodes says how many machines, world_size how many ranks"
            raise UsageError("torch takes fewer GPUs of one machine", value=f"{number:,} GPUs", hint=hint)
        self.number = number
        self.several = number > 1
        self.are_peers = are_peers
        self._here = _Here()
        self.devices = tuple(f"cuda:{index}" for index in range(number))
        self._used = used
        if self.several:
            used.update(dict.fromkeys(self.devices, False))

    @property
    def current(self) -> int:
        """Return the number of the GPU that is current in this thread."""
        return self._here.gpu

    def index(self, device: Any = None) -> int:
        """Return the number of the GPU that the program names so; the current one if it names none.

        Raises:
            RuntimeError: there is no such GPU.
        """
        if not self.several:
            return 0
        if not isinstance(device, int):
            named = torch.device(device) if isinstance(device, str) else getattr(device, "device", device)
            # `torch.cuda.device(1)` has an `idx`.
            device = None if named is None else named.idx if hasattr(named, "idx") else named.index
        if device is None or device < 0:
            return self.current
        if device >= self.number:
            raise getattr(torch, "AcceleratorError", RuntimeError)(_NO_SUCH_GPU)
        return int(device)

    def named(self, device: Any = None) -> str:
        """Return the name of that GPU, as the trace has it."""
        return self.devices[self.index(device)] if self.several else GPU

    def use(self, device: Any = None) -> int:
        """Return the number of that GPU, of which the driver makes a context now if it has none."""
        index = self.index(device)
        if self.several:
            self._used[self.devices[index]] = True
        return index

    def select(self, device: Any) -> int:
        """Make that GPU the current one, unless its number is negative; return the one that was."""
        before, wanted = self.current, self.index(device)
        if wanted != before:
            self._here.gpu = self.use(wanted)
        return before


class AutogradNodes:
    """Which GPU of several a node of autograd was made on, and which nodes are of copies of virtual host tensors.

    By their numbers: C++ would know it by the devices of their tensors.
    """

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
