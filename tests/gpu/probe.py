"""Measure what is on the GPU outside torch's allocator: before anything, and after the first use of each library.

python -m tests.gpu.probe --device cuda --out FILE.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.attempt import attempt
from tests.gpu.first_uses import FIRST_USES, FirstUse
from tests.gpu.history import AllocatorHistory
from tests.gpu.outside import nvml_counters, outside_bytes

MIB = 1 << 20


@dataclass
class Row:
    """What there is after the first use of a library; sizes are bytes."""

    after: str
    error: str | None
    outside: int | None
    allocated: int
    reserved: int
    # What was requested from torch's allocator meanwhile: workspaces among it.
    requests: list[int]
    segments: list[int]
    nvml: dict[str, Any]


def measure(name: str, use: FirstUse, device: str) -> Row:
    with AllocatorHistory(device) as history:
        failed = attempt(lambda: use(device))
    gc.collect()
    cuda = device == "cuda"
    return Row(
        name,
        failed["error"] if isinstance(failed, dict) else None,
        outside_bytes(device),
        torch.cuda.memory_allocated() if cuda else 0,
        torch.cuda.memory_reserved() if cuda else 0,
        history.bytes_of("alloc"),
        history.bytes_of("segment_alloc"),
        nvml_counters(),
    )


def describe(device: str) -> dict[str, Any]:
    """Return the versions, and the GPU as torch and as memprof know it."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "loading": os.environ.get("CUDA_MODULE_LOADING"),
    }
    if device == "cuda":
        from memprof.measured.cuda import current_gpu

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "cudnn": torch.backends.cudnn.version(),
            "gpu": str(properties),
            "uuid": str(getattr(properties, "uuid", None)),
            "memprof": attempt(lambda: current_gpu()._asdict()),
        }
    return facts


def main() -> None:
    """Measure, print a line for each library, and write all of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found: dict[str, Any] = {"before": nvml_counters(), "rows": []}
    for name, use in FIRST_USES.items():
        row = measure(name, use, asked.device)
        found["rows"].append(asdict(row))
        found |= describe(asked.device)
        asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        outside = "not known" if row.outside is None else f"{row.outside / MIB:.1f} MiB"
        print(f"{name}: outside the allocator {outside}, {len(row.requests)} requests {row.error or ''}", flush=True)


if __name__ == "__main__":
    main()
