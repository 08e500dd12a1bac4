"""Files of recorded runs: the flow behind `memprof analyze` and `memprof export`.

    FILE -capture/snapshot, trace/io-> Snapshot -recording-> [Recording] -report-> Analysis, .pickle, .json

A capture of memprof is first converted into a snapshot, by a replay of its requests through the allocator. The rest of
the flow treats both kinds alike.
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memprof.allocator import AllocatorConfig, GpuMemory, Settings, config_from_environment
from memprof.device.ceiling import (
    MEMORY_BYTES_PER_COLUMN_FILE_BYTE,
    MEMORY_BYTES_PER_FILE_BYTE,
    compute_limit_bytes,
    suggest_limit,
)
from memprof.errors import UsageError
from memprof.flows.rank_reports import get_rank
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.analysis_build import AnalysisRequest, RecordingOrigin, build_analysis
from memprof.snapshots.from_trace import ConvertedTrace, TimelineSlice, convert_to_snapshot
from memprof.snapshots.recording import Recording, Steps, build_recordings
from memprof.snapshots.slices import build_slices, list_annotations, list_event_times, name_stages
from memprof.snapshots.steps import MIN_STEPS, find_steps
from memprof.trace.columns import OOM
from memprof.trace.events import CPU, EventKind, Trace
from memprof.trace.files import GZIP_MAGIC, PICKLE_MAGIC, check_output_path, read_head
from memprof.trace.snapshot import Action, Snapshot
from memprof.units import format_bytes

PICKLE_PROTOCOL_4 = b"\x80\x04"  # head of pickle protocol 4, the first that numbers its memo in order
_FILE_KINDS = "a snapshot of torch.cuda.memory._dump_snapshot, or a capture that `memprof profile --save` wrote"


@dataclass(slots=True)
class OpenedFile:
    """A recorded file: its snapshot, its recordings and its origin."""

    snapshot: Snapshot
    recordings: list[Recording]
    origin: RecordingOrigin
    converted: ConvertedTrace | None  # of a capture; None: the file is a snapshot

    def slices(self, recording: Recording) -> list[TimelineSlice]:
        """Return the stages and module calls of one device as slices of a timeline, in microseconds."""
        if self.converted is not None:
            return self.converted.slices
        return build_slices(recording, self.snapshot.annotations)


def open_file(path: Path, progress: Callable[[str], None] = lambda _: None) -> OpenedFile:
    """Read and replay the file `path`; raise UsageError if the file is no recording, damaged, or too large."""
    head = read_head(path, _FILE_KINDS)[:2]
    if head == GZIP_MAGIC:
        return _open_capture(path)
    size = path.stat().st_size
    _check_memory(
        path, size, MEMORY_BYTES_PER_FILE_BYTE if head < PICKLE_PROTOCOL_4 else MEMORY_BYTES_PER_COLUMN_FILE_BYTE
    )
    from memprof.trace.snapshot_file import read_snapshot

    progress(f"reading {format_bytes(size)}")
    snapshot = read_snapshot(path)
    progress("replaying")
    found = build_recordings(snapshot)
    if not found:
        hint = "take it while memory is allocated, after torch.cuda.memory._record_memory_history()"
        raise UsageError("the snapshot is empty: it has neither segments nor events", value=path, hint=hint)
    for one in found:
        one.steps = find_steps(one, snapshot.annotations)
        name_stages(one, list_annotations(one, snapshot.annotations))
    notes = ["Modules and categories are guessed from the stacks."] if any(one.lives for one in found) else []
    if not snapshot.settings:
        notes.append("The file does not say the allocator's settings; the defaults are taken.")
    if snapshot.source == "simulated":
        notes.append("memprof wrote this file (memprof export): the run was simulated.")
    settings = str(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return OpenedFile(
        snapshot, found, RecordingOrigin(path.name, "torch snapshot", snapshot.source, settings, tuple(notes)), None
    )


def _open_capture(path: Path) -> OpenedFile:
    from memprof.trace.io import load_trace

    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path, "rb") as file:
        if file.read(1) == PICKLE_MAGIC:
            raise UsageError("the snapshot is compressed (gzip)", value=path, hint="unpack it first")
    trace = load_trace(path)
    num_others = len(trace.others)
    trace = max((trace, *trace.others), key=lambda one: max(_compute_peak_requested(one).values(), default=0))
    if trace.gpus:
        trace = trace.select_device(max(trace.gpus, key=_compute_peak_requested(trace).__getitem__))
    config, note = _find_allocator_settings(trace)
    gpu = trace.facts.device
    converted = convert_to_snapshot(trace, config, GpuMemory.of(gpu))
    if not converted.snapshot.traces[0]:
        raise UsageError("the capture holds no allocation on the GPU", value=path, hint="record it again")
    recordings = build_recordings(converted.snapshot, converted.origins)
    for one in recordings:
        if len(converted.steps) >= MIN_STEPS:
            one.steps = Steps(tuple(converted.steps), "the phases of the run")
        name_stages(one, (stage for stage in converted.slices if stage.track == "stages"))
    notes = [note, "Events are those that torch would record on the GPU."]
    if num_others:
        notes.append(f"Of {num_others + 1} ranks, the one that holds most is taken: rank {get_rank(trace)}.")
    if trace.gpus and trace.facts.rank is None:
        notes.append(f"Of {len(trace.gpus)} GPUs, the one that holds most is taken: {trace.device}.")
    if any(event.action is Action.OOM for event in converted.snapshot.traces[0]):
        notes.append(
            "From the out-of-memory error on, the run is followed on a GPU without limit, to show its whole need."
        )
    kind = f"memprof capture, {trace.source} on {gpu.name}"
    origin = RecordingOrigin(path.name, kind, trace.source, config.text, tuple(notes))
    return OpenedFile(converted.snapshot, recordings, origin, converted)


def _compute_peak_requested(trace: Trace) -> Counter[str]:
    """Return the peak of requested bytes of each GPU."""
    current, peak = Counter[str](), Counter[str]()
    for kind, ref in trace.events:
        if kind in (EventKind.ALLOC, EventKind.FREE) and trace.storages[ref].device != CPU:
            device, num_bytes = trace.storages[ref].device, trace.storages[ref].num_bytes
            current[device] += num_bytes if kind is EventKind.ALLOC else -num_bytes
            peak[device] = max(peak[device], current[device])
    return peak


def _find_allocator_settings(trace: Trace) -> tuple[AllocatorConfig, str]:
    """Return the allocator settings in `trace` (else those of the environment), and a sentence on their source."""
    if trace.facts.allocator is not None:
        settings = Settings.from_facts(trace.facts.allocator)
        alloc_conf = settings.alloc_conf
        return settings.config, f"Allocator settings of the run: {alloc_conf or 'the defaults'}."
    config, variable = config_from_environment()
    settings_source = f"{variable} of the environment" if variable else "the defaults"
    return config, f"The capture does not name the allocator's settings; {settings_source} are taken."


def _check_memory(path: Path, size: int, memory_per_byte: int) -> None:
    """Raise UsageError if reading a file of `size` bytes, at `memory_per_byte`, would exceed memprof's memory limit."""
    needed, limit = size * memory_per_byte, compute_limit_bytes(path)
    if needed > limit:
        raise UsageError(
            f"the file needs about {format_bytes(needed)} of memory to be read, and it may take {format_bytes(limit)}",
            value=f"{path} ({format_bytes(size)})",
            hint=f"record fewer events (max_entries=100000), or {suggest_limit(needed)}",
        )


def analyze_file(
    path: Path,
    request: AnalysisRequest,
    device: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Analysis:
    """Return the analysis of a recorded file (`memprof analyze`), of all devices (`device` None) or of one."""
    file = open_file(path, progress)
    progress("accounting")
    recordings = file.recordings
    if device is not None:
        known = ", ".join(str(recording.device) for recording in file.recordings)
        recordings = [recording for recording in recordings if recording.device == device]
        if not recordings:
            raise UsageError("the file has nothing of this GPU", value=f"--gpu-index {device}", hint=f"known: {known}")
    if request.at == "oom" and device is None:
        # Of several devices, usually only one runs out of memory.
        recordings = [recording for recording in recordings if OOM in recording.events.actions] or recordings
    return build_analysis(recordings, file.origin, request)


def export_file(path: Path, to: Path, progress: Callable[[str], None] = lambda _: None, *, force: bool = False) -> str:
    """Write the run in the file `path` to the file `to` (.pickle for memory_viz, .json for Perfetto); return the
    viewer's URL. Raises UsageError: unusable file or suffix; MemprofError: `to` cannot be written."""
    suffix = to.suffix.lower()
    if suffix not in (".pickle", ".pkl", ".json"):
        raise UsageError(
            "not a kind of file to export to", value=to, hint="name.pickle (memory_viz) or name.json (Perfetto)"
        )
    if to.exists() and path.exists() and to.samefile(path):
        raise UsageError("this would replace the file that is read", value=to, hint="choose another name with --to")
    from memprof.report.export import memory_viz, perfetto

    check_output_path(to, perfetto.TRACE_FILE if suffix == ".json" else memory_viz.SNAPSHOT_FILE, force=force)
    file = open_file(path, progress)
    progress("writing")
    if suffix == ".json":
        timelines = [(recording, list_event_times(recording), file.slices(recording)) for recording in file.recordings]
        perfetto.write_perfetto(timelines, to, force=force)
        return "https://ui.perfetto.dev"
    memory_viz.write_snapshot(file.snapshot, to, force=force)
    return "https://pytorch.org/memory_viz"
