"""Records one case on the CUDA GPU of this machine.

Files of a case: NAME.capture, what `memprof profile --device cuda --save` writes (every allocation in order, with its
operator, bytes, module and stage: `memprof show` reads it), and NAME.snapshot.pickle.gz, the allocator's segments and
history without stacks (unpacked, `memprof analyze` reads it). INDEX.json has the GPU and the peaks.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pickle
import platform
import time
from pathlib import Path
from typing import Any

import torch

from memprof.device.nvml import Nvml
from memprof.flows.gpus import read_device_facts, resolve_settings
from memprof.measured import MeasuredDevice
from memprof.measured.cuda import NvmlUse
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import Target
from memprof.trace.io import save_trace
from memprof.watch.collection import disable_garbage_collection
from memprof.workload.models import find_source
from memprof.workload.rng import NormalsInSinglePrecision
from memprof.workload.step import Workload

INDEX = "INDEX.json"
_HISTORY = ("action", "addr", "size", "stream")
_SEGMENT = ("address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type")
_BLOCK = ("address", "size", "requested_size", "state")


def record(name: str, spec: TargetSpec, folder: Path) -> dict[str, Any]:
    """Run `spec` on the GPU, which nothing of this process has used before, and write its files.

    Returns:
        What INDEX.json says of it, in bytes; `incomplete` is why the capture is not all of the run, if it is not.

    Raises:
        MemprofError: the case cannot be built, or the GPU cannot be used.
        RuntimeError: its run failed (torch.OutOfMemoryError among them).
    """
    began = time.perf_counter()
    source = find_source(spec)
    workload = Workload(spec, source)
    settings = resolve_settings(spec.alloc_conf)
    measured_on = read_device_facts("cuda")
    device = MeasuredDevice("cuda", NvmlUse())
    with disable_garbage_collection(), device:
        workload.run(device, building=NormalsInSinglePrecision)
    trace = device.trace
    trace.facts = dataclasses.replace(
        trace.facts,
        command="truth",
        target=Target(
            asked=spec.edit(device="cuda"),
            model=source.name,
            num_parameters=workload.num_parameters,
            num_trainable_parameters=workload.num_trainable_parameters,
            context_length=workload.context_length,
            dtype=workload.dtype,
            vocab_size=spec.vocab_size,
            alloc_conf=settings.alloc_conf,
        ),
        device=measured_on,
        allocator=settings.facts,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_trace(trace, folder / f"{name}.capture")
    with gzip.GzipFile(folder / f"{name}.snapshot.pickle.gz", "wb", mtime=0) as file:
        pickle.dump(compact(device.snapshot or {}), file, protocol=4)
    incomplete = {} if device.error is None else {"incomplete": " ".join(str(device.error).split())[:300]}
    return {**peaks(trace, device.snapshot or {}), "seconds": round(time.perf_counter() - began, 1), **incomplete}


def peaks(trace: Trace, snapshot: dict[str, Any]) -> dict[str, int | None]:
    """The most that torch counted as allocated and reserved, and that NVML showed of the whole GPU."""
    read = {
        "allocated": [sample.peak_allocated_bytes for sample in trace.samples],
        "reserved": [sample.reserved_bytes for sample in trace.samples],
        "nvml": [sample.device_used_bytes for sample in trace.samples],
    }
    found = {key: max((value for value in values if value is not None), default=None) for key, values in read.items()}
    held = highest = 0
    for entry in (entry for history in snapshot.get("device_traces", ()) for entry in history):
        sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(entry["action"], 0)
        held += sign * entry["size"]
        highest = max(highest, held)
    # Between two samples a segment may come and go.
    return {**found, "reserved": max(highest, found["reserved"] or 0)}


def compact(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot without stacks, and without what the analysis does not read."""
    return {
        "segments": [
            {**_only(segment, _SEGMENT), "blocks": [_only(block, _BLOCK) for block in segment.get("blocks", ())]}
            for segment in snapshot.get("segments", ())
        ],
        "device_traces": [[_only(entry, _HISTORY) for entry in t] for t in snapshot.get("device_traces", ())],
    }


def _only(entry: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: entry[key] for key in keys if key in entry}


def machine() -> dict[str, Any]:
    """GPU, driver and versions: what a simulation has to be of."""
    import transformers

    with Nvml() as nvml:
        driver = nvml.read().driver_version
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "total_bytes": properties.total_memory,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def read_index(folder: Path) -> dict[str, Any]:
    """INDEX.json of a folder, with no cases if there is none."""
    path = folder / INDEX
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cases": {}}
    return index


def write_index(folder: Path, index: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
