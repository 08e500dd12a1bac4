"""What is on the card beside torch's own segments, as NVML sees it while a run is measured."""

from __future__ import annotations

import os
from typing import Any

import torch

from memprof.device.nvml import Nvml


class Outside:
    """NVML, held open for one card: a context manager.

    Args:
        nvml: what to ask; as a rule left out.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        self._nvml = Nvml() if nvml is None else nvml
        self._card: int | str = 0

    def __enter__(self) -> Outside:
        current = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
        # CUDA's ordinal is NVML's index only where no card is hidden.
        self._card = current if uuid is None else str(uuid)
        self._nvml.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._nvml.__exit__(None, None, None)

    def used_bytes(self) -> int | None:
        """Of the whole card, by everybody; None: NVML cannot be asked."""
        return self._nvml.use(self._card).used_bytes

    def facts(self) -> dict[str, Any]:
        """What the bridge (ledger/bridge.py) makes of this moment; `note` says why something is None."""
        use = self._nvml.use(self._card)
        own = os.getpid()
        return {
            "reserved_bytes": torch.cuda.memory_reserved(),
            "process_bytes": use.own_bytes,
            "used_bytes": use.used_bytes,
            "processes": None
            if use.used_bytes is None
            else [
                {"pid": process.pid, "name": process.name, "bytes": process.used_bytes}
                for process in use.by_process
                if process.pid != own
            ],
            "note": use.note,
        }
