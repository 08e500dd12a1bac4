"""Measurements of torch.cuda and NVML, next to the replay of a run that was measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from memprof.ledger.stages import at_stage
from memprof.report.documents.report import Report
from memprof.report.terminal.console import dim
from memprof.units import format_bytes

# Header -> field of a stage, for measurements of torch.cuda and NVML.
_GPU_COLUMNS = {
    "torch.cuda\npeak": "measured_peak_bytes",
    "torch.cuda\nreserved": "measured_reserved_bytes",
    "NVML\nused": "device_used_bytes",
}
# Name -> field of a stage from the replay, and field from torch.cuda.
_COMPARED_FIELDS = {
    "allocated": ("allocated_bytes", "measured_allocated_bytes"),
    "peak": ("peak_allocated_bytes", "measured_peak_bytes"),
    "reserved": ("reserved_bytes", "measured_reserved_bytes"),
}


def find_gpu_columns(document: Report) -> dict[str, str]:
    """Return header -> field of a stage for the measured columns; empty if the run was not measured on a GPU."""
    if document.source != "measured" or document.on_cpu:
        return {}
    known = {name for row in document.stages for name in _GPU_COLUMNS.values() if getattr(row, name) is not None}
    return {header: name for header, name in _GPU_COLUMNS.items() if name in known}


def describe_gpu_differences(document: Report) -> Iterator[Text]:
    """Yield a note with the largest differences between replayed and measured bytes, and their stages."""
    if not find_gpu_columns(document):
        return
    far = []
    for what, (ours, theirs) in _COMPARED_FIELDS.items():
        read = [row for row in document.stages if getattr(row, theirs) is not None]
        most = max(read, key=lambda row: abs(getattr(row, theirs) - getattr(row, ours)), default=None)
        if most is not None and (by := getattr(most, theirs) - getattr(most, ours)):
            where = at_stage(most.name, most.step)
            far.append(f"{what} {format_bytes(abs(by))} {'more' if by > 0 else 'less'} ({where})")
    said = f"At the most it says: {', '.join(far)}." if far else "They agree, to the byte."
    text = f"Allocated, peak and reserved are a replay of what the program requested, torch.cuda is the GPU. {said}"
    yield dim(text + " NVML counts the context and other processes too.")
