"""Workspaces of cuBLAS in a run."""

from __future__ import annotations

from typing import Any

from memprof.allocator.cublas import LT_WORKSPACE, WORKSPACE, CublasWorkspace
from memprof.virtual.device_state import DeviceState
from memprof.virtual.engine import is_in_backward
from memprof.virtual.operator_call import OpInfo
from memprof.watch.forward import CallSite


class CublasWorkspaces:
    """The cuBLAS workspaces of a run: one for each handle (a thread has one handle per GPU) and stream."""

    def __init__(self) -> None:
        # The first matrix product settles the workspace size: the program may set the environment variable before.
        self._size: CublasWorkspace | None = None
        self._workspaces: dict[str, int] = {}

    def allocate_once(self, device_state: DeviceState, operator: OpInfo, args: Any, site: CallSite, gpu: str) -> None:
        """Allocate the workspace of a matrix product on `gpu`, unless the current handle and stream have one."""
        if self._size is None:
            gpu_properties = device_state.gpu
            self._size = CublasWorkspace.for_gpu(
                gpu_properties.compute_capability, gpu_properties.release, gpu_properties.gcn_arch
            )
        if not self._size.is_permanent:
            device_state.allocate_transients([self._size.num_bytes], operator.name, site, gpu)
            return
        is_lt = operator.uses_cublaslt is not None and operator.uses_cublaslt(args)
        lt_num_bytes = self._size.lt_num_bytes if is_lt else 0
        if lt_num_bytes and not self._size.is_lt_permanent:
            with device_state.hold_scratch([lt_num_bytes], operator.name, site, gpu):
                self._keep(device_state, WORKSPACE, self._size.num_bytes, site, gpu)
            return
        self._keep(device_state, WORKSPACE, self._size.num_bytes, site, gpu)
        if lt_num_bytes:
            self._keep(device_state, LT_WORKSPACE, lt_num_bytes, site, gpu)

    def _keep(self, device_state: DeviceState, name: str, num_bytes: int, site: CallSite, gpu: str) -> None:
        """Allocate the workspace `name`, unless the current handle and stream have it."""
        thread = "backward" if is_in_backward() else device_state.operator_lock.thread_name or "forward"
        key = f"{name} {thread} {gpu} {device_state.recorder.streams.get_current_stream(gpu)}"
        if key not in self._workspaces:
            storages = device_state.recorder.storages
            self._workspaces[key] = storages.allocate_without_tensor(num_bytes, name, site, gpu)

    def clear(self, device_state: DeviceState) -> None:
        """Free all workspaces, as torch's `clearCublasWorkspaces` (CublasHandlePool.cpp) does."""
        for index in self._workspaces.values():
            device_state.recorder.storages.free_without_tensor(index)
        self._workspaces.clear()
