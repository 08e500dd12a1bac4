"""Values that torch.cuda and NVML measured on a GPU, shown beside those of memprof's allocator replay."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from memprof.report.documents.report import Report
from memprof.report.terminal.console import dim
from memprof.report.terminal.stage_names import describe_stage
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
    """Return measured columns as {header: field of `Stage`}; empty if the run was not measured on a GPU."""
    if document.source != "measured" or document.on_cpu:
        return {}
    names = {name for row in document.stages for name in _GPU_COLUMNS.values() if getattr(row, name) is not None}
    return {header: name for header, name in _GPU_COLUMNS.items() if name in names}


def describe_gpu_differences(document: Report) -> Iterator[Text]:
    """Yield a note with the largest differences between replayed and measured bytes, and their stages."""
    if not find_gpu_columns(document):
        return
    differences = []
    for label, (replayed, measured) in _COMPARED_FIELDS.items():
        rows = [row for row in document.stages if getattr(row, measured) is not None]
        row = max(rows, key=lambda row: abs(getattr(row, measured) - getattr(row, replayed)), default=None)
        if row is not None and (delta := getattr(row, measured) - getattr(row, replayed)):
            where = describe_stage(row.name, row.step)
            differences.append(f"{label} {format_bytes(abs(delta))} {'more' if delta > 0 else 'less'} ({where})")
    summary = f"At the most it says: {', '.join(differences)}." if differences else "They agree, to the byte."
    text = f"Allocated, peak and reserved are a replay of what the program requested, torch.cuda is the GPU. {summary}"
    yield dim(text + " NVML counts the context and other processes too.")
