"""What is on the card beside torch's own segments, as NVML sees it while a run is measured."""

from __future__ import annotations

import os

import torch

from memprof.device.nvml import Nvml
from memprof.measured.cuda import nvml_card
from memprof.trace.facts import NvmlFacts, OtherProcess


class Outside:
    """NVML, held open for one card: a context manager."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._card: int | str = 0

    def __enter__(self) -> Outside:
        self._card = nvml_card()
        self._nvml.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._nvml.__exit__(None, None, None)

    def used_bytes(self) -> int | None:
        """Of the whole card, by everybody; None: NVML cannot be asked."""
        return self._nvml.use(self._card).used_bytes

    def facts(self) -> NvmlFacts:
        """What the bridge (ledger/bridge.py) makes of this moment."""
        use = self._nvml.use(self._card)
        others = [process for process in use.by_process if process.pid != os.getpid()]
        return NvmlFacts(
            reserved_bytes=torch.cuda.memory_reserved(),
            process_bytes=use.own_bytes,
            used_bytes=use.used_bytes,
            processes=None
            if use.used_bytes is None
            else tuple(OtherProcess(process.pid, process.name, process.used_bytes) for process in others),
            note=use.note,
        )
