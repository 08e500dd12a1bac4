"""Runs that others recorded on real GPUs, made into the trace of a measured run."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memprof.allocator import replay_snapshot
from memprof.allocator.replay import TraceReplay
from memprof.measured.history import History, get_live_blocks, read_history
from memprof.measured.marks import Mark, Marks
from memprof.measured.merge import collect_allocations, merge
from memprof.measured.operators import Profile
from memprof.trace.events import EventKind, Phase, PhaseKind, Trace
from memprof.trace.snapshot_file import read_snapshot


@pytest.fixture(scope="module")
def snapshots(shared_dir: Path) -> dict[Path, dict[str, Any]]:
    """Those whose entries have a time (torch 2.1), raw."""
    index = shared_dir / "snapshots" / "INDEX.csv"
    if not index.exists():
        pytest.skip(f"no snapshots: {index} is not there")
    with index.open(newline="") as file:
        paths = [index.with_name(row["file"]) for row in csv.DictReader(file)]
    found = {path: pickle.loads(path.read_bytes()) for path in paths}  # handed to us, and looked through
    return {path: snapshot for path, snapshot in found.items() if all("time_us" in one for one in _entries(snapshot))}


def _entries(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entries in snapshot["device_traces"]:
        yield from entries


def _gpus(snapshot: dict[str, Any]) -> Iterator[tuple[int, History, dict[int, int]]]:
    """Each GPU's number, history and the blocks that were there before it."""
    for gpu, entries in enumerate(snapshot["device_traces"]):
        if any(entry["action"] == "alloc" for entry in entries):
            history = read_history(snapshot, gpu, [])
            seen = {life.address for life in history.allocations}
            yield gpu, history, {at: size for at, size in get_live_blocks(snapshot, gpu).items() if at not in seen}


def test_what_is_alive_at_the_end_is_what_the_allocator_holds(snapshots: dict[Path, dict[str, Any]]) -> None:
    lives = 0
    for path, snapshot in snapshots.items():
        for gpu, history, before in _gpus(snapshot):
            assert history.count_missing_bytes(get_live_blocks(snapshot, gpu), before) == 0, path.name
            lives += len(history.allocations)
    assert lives > 60_000


@pytest.mark.nightly
def test_replayed_it_reserves_what_the_gpu_reserved(snapshots: dict[Path, dict[str, Any]]) -> None:
    """Of runs that were recorded from their beginning, and were refused nothing."""
    gpus = 0
    for path, snapshot in snapshots.items():
        replays = {replay.device: replay for replay in replay_snapshot(read_snapshot(path))}
        for gpu, history, before in _gpus(snapshot):
            if before or any(entry["action"] == "oom" for entry in snapshot["device_traces"][gpu]):
                continue
            marks = Marks(lambda: (None, None, None, None, None))
            marks.phases, marks.marks = [Phase(PhaseKind.OTHER, 0, 0)], [Mark(0, EventKind.PHASE, 0)]
            trace = Trace(source="measured", device=history.device)
            merge(trace, marks, collect_allocations(Profile(), history), [])
            replay = TraceReplay(trace, config=replays[gpu].config)
            replay.advance()
            reserved = sum(one["total_size"] for one in snapshot["segments"] if one["device"] == gpu)
            assert replay.timeline.reserved[-1] == reserved, path.name
            gpus += 1
    assert gpus == 9
