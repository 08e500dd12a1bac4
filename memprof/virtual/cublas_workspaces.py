"""Record of the workspaces that torch's cuBLAS handles have allocated in a run."""

from __future__ import annotations

from typing import Any

from memprof.device.cublas import LT_WORKSPACE, WORKSPACE, CublasWorkspace
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import in_backward
from memprof.virtual.operator_call import OpInfo
from memprof.watch.forward import CallSite


class CublasWorkspaces:
    """The cuBLAS workspaces of a run: one for each handle (a thread has a handle on each GPU) and stream."""

    def __init__(self) -> None:
        # The first matrix product settles the workspace size: the program may set the environment variable before.
        self._size: CublasWorkspace | None = None
        self._workspaces: dict[str, int] = {}

    def take(self, device_state: DeviceState, operator: OpInfo, args: Any, place: CallSite, gpu: str) -> None:
        """Allocate the workspace of a matrix product of `args` on `gpu`, unless its handle and stream have one."""
        if self._size is None:
            self._size = CublasWorkspace.of(device_state.gpu.compute_capability, device_state.gpu.release)
        if not self._size.permanent:
            device_state.transients([self._size.num_bytes], operator.name, place, gpu)
            return
        thread = "backward" if in_backward() else device_state.turn.thread or "forward"
        handle = f"{thread} {gpu} {device_state.recorder.streams.get_current_stream(gpu)}"
        storages = device_state.recorder.storages
        if handle not in self._workspaces:
            self._workspaces[handle] = storages.allocate_without_tensor(self._size.num_bytes, WORKSPACE, place, gpu)
        lt = "lt " + handle
        is_lt = operator.uses_cublaslt is not None and operator.uses_cublaslt(args)
        if is_lt and self._size.lt_num_bytes and lt not in self._workspaces:
            self._workspaces[lt] = storages.allocate_without_tensor(self._size.lt_num_bytes, LT_WORKSPACE, place, gpu)

    def clear(self, device_state: DeviceState) -> None:
        """Free all workspaces, as `clearCublasWorkspaces` of CublasHandlePool.cpp does."""
        for index in self._workspaces.values():
            device_state.recorder.storages.free_without_tensor(index)
        self._workspaces.clear()
