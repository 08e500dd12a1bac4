"""The workspaces that cuBLAS has taken in a run."""

from __future__ import annotations

from typing import Any

from memprof.device.cublas import LT_WORKSPACE, WORKSPACE, CublasWorkspace
from memprof.virtual.calls import OpInfo
from memprof.virtual.engine import in_backward
from memprof.virtual.machine import Machine
from memprof.watch.forward import Place


class CublasWorkspaces:
    """One for each handle, of which a thread has its own on each GPU, and for each stream."""

    def __init__(self) -> None:
        # Its size is settled by the first product: the program may set the environment before.
        self._size: CublasWorkspace | None = None
        self._taken: dict[str, int] = {}

    def take(self, machine: Machine, operator: OpInfo, args: Any, place: Place, card: str) -> None:
        """Take what a product of `args` on `card` needs and has not been taken yet."""
        if self._size is None:
            self._size = CublasWorkspace.of(machine.card.compute_capability, machine.card.release)
        if not self._size.permanent:
            machine.transients([self._size.num_bytes], operator.name, place, card)
            return
        thread = "backward" if in_backward() else machine.turn.thread or "forward"
        handle = f"{thread} {card} {machine.recorder.streams.current(card)}"
        storages = machine.recorder.storages
        if handle not in self._taken:
            self._taken[handle] = storages.allocate_hidden(self._size.num_bytes, WORKSPACE, place, card)
        lt = "lt " + handle
        is_lt = operator.uses_cublaslt is not None and operator.uses_cublaslt(args)
        if is_lt and self._size.lt_num_bytes and lt not in self._taken:
            self._taken[lt] = storages.allocate_hidden(self._size.lt_num_bytes, LT_WORKSPACE, place, card)

    def clear(self, machine: Machine) -> None:
        """Free them: the next product takes them again (CublasHandlePool.cpp, `clearCublasWorkspaces`)."""
        for index in self._taken.values():
            machine.recorder.storages.free_hidden(index)
        self._taken.clear()
