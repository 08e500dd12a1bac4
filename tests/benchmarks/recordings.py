"""A real recording of a script, compared with the same script on the virtual GPU.

    python -m tests.benchmarks.recordings SNAPSHOT [--gpu NAME] [--path DIR]... [--cwd DIR] [--dump N]
        [--torch-release VERSION] -- SCRIPT [ARGS...]

SNAPSHOT is what `torch.cuda.memory._dump_snapshot` wrote on a real GPU. SCRIPT runs under `memprof.virtual_gpu`; its
own calls of `_record_memory_history` and `_dump_snapshot` mark the window that is compared. The exit code is 1 below
the bars: 99 % of the recorded allocations matched in order and bytes, at most 1 % too many, the peak within 0.2 %.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import json
import os
import pickle
import re
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

import memprof
from memprof.allocator import config_from_environment, parse_release
from memprof.trace.events import HOST, EventKind, Trace, short_source
from tests.unit.allocator.replaying import replay_trace

LEAST_MATCHED = 0.99
MOST_EXTRA = 0.01
PEAK_TOLERANCE = 0.002

_PLUMBING = re.compile(
    r"unwind|CapturedTraceback|gather_with_cpp|CachingAllocator|empty|StorageImpl|create_out|set_output|TensorIterator"
    r"|resize_|wrap_kernel_functor|wrapper_C|zeros|redispatch|VariableType|callUnboxed|Dispatcher|^at::_ops::.*::call"
)


@dataclass(frozen=True)
class Allocation:
    """One allocation of a window: its bytes, and who made it (an operator or kernel, and the script's line)."""

    num_bytes: int
    made_by: str


@dataclass(frozen=True)
class Window:
    """What was taken between the start of a recording and its dump, and the most that was held of it."""

    allocations: list[Allocation]
    peak_bytes: int
    # What the allocator holds of the GPU at the dump, over the whole process and not the window alone.
    reserved_bytes: int


@dataclass(frozen=True)
class Comparison:
    recorded: int
    simulated: int
    matched: int
    extra: int
    recorded_peak: int
    simulated_peak: int
    recorded_reserved: int
    simulated_reserved: int
    missing_by: dict[str, int]
    extra_by: dict[str, int]

    @property
    def within_bars(self) -> bool:
        return (
            self.matched >= LEAST_MATCHED * self.recorded
            and self.extra <= MOST_EXTRA * self.recorded
            and abs(self.simulated_peak - self.recorded_peak) <= PEAK_TOLERANCE * self.recorded_peak
        )


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dicts, numbers and strings; a snapshot has nothing else, and nothing else is constructed."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a snapshot constructs nothing, this one {module_name}.{global_name}")


def read_snapshot(file: IO[bytes]) -> Window:
    """The allocations and the peak of a recorded window; memory that was held before it is not counted."""
    snapshot = _PlainUnpickler(file).load()
    events: list[dict[str, Any]] = next((trace for trace in snapshot["device_traces"] if trace), [])
    allocations: list[Allocation] = []
    sizes: dict[int, int] = {}
    held = peak = 0
    for event in events:
        if event["action"] == "alloc":
            allocations.append(Allocation(event["size"], _made_by(event.get("frames") or [])))
            sizes[event["addr"]] = event["size"]
            held += event["size"]
            peak = max(peak, held)
        elif event["action"] == "free_completed":
            held -= sizes.pop(event["addr"], event["size"])
    return Window(allocations, peak, sum(segment["total_size"] for segment in snapshot["segments"]))


def _made_by(frames: list[dict[str, Any]]) -> str:
    names = (frame["name"].replace("(anonymous namespace)::", "").split("(")[0] for frame in frames)
    native = next((name for name in names if "at::" in name and not _PLUMBING.search(name)), "")
    kernel = re.sub(r"^void |<.*", "", native)
    line = next(
        (
            f"{f['filename']}:{f['line']} {f['name']}"
            for f in frames
            if f["filename"].endswith(".py") and "site-packages" not in f["filename"]
        ),
        "",
    )
    return f"{kernel or 'unknown'} at {short_source(line) if line else 'backward'}"


def simulate(
    script: str,
    arguments: list[str],
    gpu: str,
    paths: list[Path],
    directory: Path | None,
    dump_number: int | None,
    torch_release: str | None,
) -> Window:
    """Run `script` as a program on the virtual GPU, and take the window that it records itself.

    A script may record and dump several times: `dump_number` (from 1) says which dump is the one, None the last.
    """
    # Paths that the caller gave are relative to where it was called from.
    sys.path[:0] = [str(path.resolve()) for path in paths]
    if directory is not None:
        os.chdir(directory)
    started: list[int] = []
    windows: list[tuple[int, int]] = []
    active = memprof.virtual_gpu(gpu, torch_release=torch_release)
    with active as virtual:

        def now() -> int:
            return len(virtual._virtual.recorder.trace.events)

        def record(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
            if enabled is None:
                started.clear()
            elif not started:
                started.append(now())

        def dump(*args: Any, **kwargs: Any) -> None:
            windows.extend((start, now()) for start in started)
            if len(windows) == dump_number:
                raise _Dumped

        taken = torch.cuda.memory._snapshot

        def snapshot(*args: Any, **kwargs: Any) -> Any:
            dump()
            return taken(*args, **kwargs)

        torch.cuda.memory._record_memory_history = record
        torch.cuda.memory._dump_snapshot = dump
        torch.cuda.memory._snapshot = snapshot
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        except _Dumped:
            pass
    if len(windows) < (dump_number or 1):
        sys.exit(f"the script dumped {len(windows)} recordings that it had begun")
    return trace_window(active.trace, *windows[(dump_number or 0) - 1], torch_release)


class _Dumped(BaseException):
    """The dump that was requested has been made: the rest of the script does not matter."""


def trace_window(trace: Trace, start: int, end: int, torch_release: str | None = None) -> Window:
    """The events from `start` to `end` of a trace, counted as those of a snapshot are."""
    allocations: list[Allocation] = []
    held = peak = 0
    for kind, ref in trace.events[start:end]:
        if kind not in (EventKind.ALLOC, EventKind.FREE) or trace.storages[ref].device == HOST:
            continue
        storage = trace.storages[ref]
        if kind is EventKind.FREE:
            held -= storage.num_bytes
            continue
        line = trace.source_line(storage)
        made_by = f"{trace.op(storage)} at {short_source(line) if line else 'backward'}"
        allocations.append(Allocation(storage.num_bytes, made_by))
        held += storage.num_bytes
        peak = max(peak, held)
    # Every process that made a recording may have had settings of its own; they are those of the environment here.
    release = parse_release(torch_release or torch.__version__)
    config, _ = config_from_environment(os.environ, release)
    reserved = replay_trace(trace, config=config, release=release).reserved
    return Window(allocations, peak, reserved[end - 1] if end else 0)


def compare(recorded: Window, simulated: Window) -> Comparison:
    """Match the two sequences of bytes in order; what is left over on either side is grouped by who made it."""
    real = [a.num_bytes for a in recorded.allocations]
    virtual = [a.num_bytes for a in simulated.allocations]
    matcher = difflib.SequenceMatcher(None, real, virtual, autojunk=False)
    missing: collections.Counter[str] = collections.Counter()
    extra: collections.Counter[str] = collections.Counter()
    matched = 0
    for tag, real_from, real_to, virtual_from, virtual_to in matcher.get_opcodes():
        if tag == "equal":
            matched += real_to - real_from
            continue
        missing.update(f"{a.num_bytes:,} bytes, {a.made_by}" for a in recorded.allocations[real_from:real_to])
        extra.update(f"{a.num_bytes:,} bytes, {a.made_by}" for a in simulated.allocations[virtual_from:virtual_to])
    return Comparison(
        recorded=len(real),
        simulated=len(virtual),
        matched=matched,
        extra=len(virtual) - matched,
        recorded_peak=recorded.peak_bytes,
        simulated_peak=simulated.peak_bytes,
        recorded_reserved=recorded.reserved_bytes,
        simulated_reserved=simulated.reserved_bytes,
        missing_by=dict(missing.most_common()),
        extra_by=dict(extra.most_common()),
    )


def table(result: Comparison, rows: int = 20) -> str:
    lines = [
        f"recorded {result.recorded:,}, simulated {result.simulated:,}: matched {result.matched:,}"
        f" ({result.matched / max(1, result.recorded):.2%}), too many {result.extra:,}",
        f"peak of the window: recorded {result.recorded_peak:,}, simulated {result.simulated_peak:,} bytes"
        f" ({result.simulated_peak / max(1, result.recorded_peak) - 1:+.3%})",
        f"reserved at the dump: recorded {result.recorded_reserved:,}, simulated {result.simulated_reserved:,} bytes"
        f" ({result.simulated_reserved / max(1, result.recorded_reserved) - 1:+.3%})",
    ]
    for title, groups in (("not simulated", result.missing_by), ("not recorded", result.extra_by)):
        lines += [f"{title}:"] * bool(groups)
        lines += [f"  {count:5} x {what}" for what, count in list(groups.items())[:rows]]
        lines += [f"  and {len(groups) - rows} more kinds"] * (len(groups) > rows)
    return "\n".join([*lines, "within the bars" if result.within_bars else "below the bars"])


def main(arguments: list[str] | None = None) -> int:
    """Compare one recording with its script; 0 if the two are as close as requested."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recordings")
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--gpu", default="rtx-4090", help="the virtual GPU, as in `memprof gpus`")
    parser.add_argument("--path", type=Path, action="append", default=[], help="a folder of modules the script imports")
    parser.add_argument("--cwd", type=Path, help="where the script runs")
    parser.add_argument("--dump", type=int, help="which of the script's dumps it is, from 1 (default: the last)")
    parser.add_argument("--torch-release", help="as in `memprof run` (default: the installed one)")
    parser.add_argument("--json", action="store_true", help="the whole comparison as JSON instead of a table")
    own = sys.argv[1:] if arguments is None else arguments
    if "--" not in own or not own[own.index("--") + 1 :]:
        parser.error("give the script and its arguments after --")
    script, *script_arguments = own[own.index("--") + 1 :]
    options = parser.parse_args(own[: own.index("--")])
    with options.snapshot.open("rb") as file:
        recorded = read_snapshot(file)
    simulated = simulate(
        script, script_arguments, options.gpu, options.path, options.cwd, options.dump, options.torch_release
    )
    result = compare(recorded, simulated)
    print(json.dumps({**asdict(result), "within_bars": result.within_bars}) if options.json else table(result))
    return 0 if result.within_bars else 1


if __name__ == "__main__":
    sys.exit(main())
