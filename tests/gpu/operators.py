"""Record what each operator of operator_table.py requests: on the GPU, on the CPU (nothing: its logic), or virtually.

python -m tests.gpu.operators cuda|cpu|virtual --out FILE.jsonl [--gpu NAME] [--only NAME ...] [--family NAME ...]

`--family` takes families of library_table.py (convolutions, transforms, ...) instead of that table.

Each is called twice. The first call has what a library takes once (workspaces, plans), the second what each one takes.
A line for each: {"operator", "first", "again"}, lists of bytes in order; null on the CPU; or {"operator", "error"}.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memprof.device.catalog import find_gpu
from memprof.trace.events import HOST, EventKind, Trace
from memprof.virtual import VirtualGpu
from tests.gpu import library_table
from tests.gpu.history import AllocatorHistory
from tests.gpu.operator_table import Call, Prepare, operators

Measure = Callable[[Call], list[int] | None]


def on_device(device: str) -> Measure:
    """Measure on a real device, by the allocator's history; None on the CPU, which has none."""

    def measure(call: Call) -> list[int] | None:
        with AllocatorHistory(device) as history:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
        return history.bytes_of("alloc") if device == "cuda" else None

    return measure


def on_virtual_gpu(trace: Trace) -> Measure:
    """Measure on the virtual GPU that records into `trace`."""

    def measure(call: Call) -> list[int]:
        start = len(trace.events)
        call()
        gc.collect()
        events = trace.events[start:]
        allocated = [trace.storages[event.ref] for event in events if event.kind is EventKind.ALLOC]
        return [storage.num_bytes for storage in allocated if storage.device != HOST and storage.num_bytes]

    return measure


def record(table: dict[str, Prepare], measure: Measure, out: Path) -> None:
    """Measure every operator, and write each as soon as it is there."""
    gc.collect()
    gc.freeze()  # what was imported is not looked through again at each collection
    with out.open("w", encoding="utf-8") as file:
        for name, prepare in table.items():
            file.write(json.dumps({"operator": name, **_measured(prepare, measure)}) + "\n")
            file.flush()


def _measured(prepare: Prepare, measure: Measure) -> dict[str, Any]:
    try:
        call = prepare()
        gc.collect()
        first = measure(call)
        gc.collect()
        return {"first": first, "again": measure(call)}
    except Exception as error:  # whatever it is, it is the finding
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("where", choices=("cuda", "cpu", "virtual"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="h100-80gb", help="the virtual one")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these operators alone")
    families = {family.__name__: family for family in library_table.FAMILIES}
    parser.add_argument("--family", nargs="*", choices=families, help="of library_table.py")
    asked = parser.parse_args()

    def table(device: str) -> dict[str, Prepare]:
        whole = operators(device)
        if asked.family is not None:
            whole = {name: one for family in asked.family for name, one in families[family](device)}
        return {name: one for name, one in whole.items() if asked.only is None or name in asked.only}

    if asked.where == "virtual":
        with VirtualGpu(find_gpu(asked.gpu), workspaces=True) as gpu:
            record(table("cuda"), on_virtual_gpu(gpu.trace), asked.out)
    else:
        record(table(asked.where), on_device(asked.where), asked.out)


if __name__ == "__main__":
    main()
