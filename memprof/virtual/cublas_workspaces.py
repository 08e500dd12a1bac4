"""The workspaces that cuBLAS has taken in a run."""

from __future__ import annotations

from typing import Any

from memprof.device.cublas import LT_WORKSPACE, WORKSPACE, CublasWorkspace
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import in_backward
from memprof.virtual.operator_call import OpInfo
from memprof.watch.forward import CallSite


class CublasWorkspaces:
    """One for each handle, of which a thread has its own on each GPU, and for each stream."""

    def __init__(self) -> None:
        # Its size is settled by the first product: the program may set the environment before.
        self._size: CublasWorkspace | None = None
        self._taken: dict[str, int] = {}

    def take(self, machine: DeviceState, operator: OpInfo, args: Any, place: CallSite, gpu: str) -> None:
        """Take what a product of `args` on `gpu` needs and has not been taken yet."""
        if self._size is None:
            self._size = CublasWorkspace.of(machine.gpu.compute_capability, machine.gpu.release)
        if not self._size.permanent:
            machine.transients([self._size.num_bytes], operator.name, place, gpu)
            return
        thread = "backward" if in_backward() else machine.turn.thread or "forward"
        handle = f"{thread} {gpu} {machine.recorder.streams.current(gpu)}"
        storages = machine.recorder.storages
        if handle not in self._taken:
            self._taken[handle] = storages.allocate_hidden(self._size.num_bytes, WORKSPACE, place, gpu)
        lt = "lt " + handle
        is_lt = operator.uses_cublaslt is not None and operator.uses_cublaslt(args)
        if is_lt and self._size.lt_num_bytes and lt not in self._taken:
            self._taken[lt] = storages.allocate_hidden(self._size.lt_num_bytes, LT_WORKSPACE, place, gpu)

    def clear(self, machine: DeviceState) -> None:
        """Free them: the next product takes them again (CublasHandlePool.cpp, `clearCublasWorkspaces`)."""
        for index in self._taken.values():
            machine.recorder.storages.free_hidden(index)
        self._taken.clear()
