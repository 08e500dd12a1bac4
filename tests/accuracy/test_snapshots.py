"""Snapshots that others recorded on real GPUs, torch 2.0 to 2.11: every address must come out as recorded."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from memprof.allocator import replay_snapshot
from memprof.trace.snapshot import Action, BlockState
from memprof.trace.snapshot_file import read_snapshot

MIB = 1 << 20


@pytest.fixture(scope="module")
def index(shared_dir: Path) -> dict[str, dict[str, str]]:
    path = shared_dir / "snapshots" / "INDEX.csv"
    if not path.exists():
        pytest.skip(f"no snapshots: {path} is not there")
    with path.open(newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def test_every_address_and_the_final_layout(index: dict[str, dict[str, str]], shared_dir: Path) -> None:
    wrong = []
    allocations = 0
    for name, row in index.items():
        for found in replay_snapshot(read_snapshot(shared_dir / "snapshots" / name)):
            allocations += found.allocations
            if not found.exact or found.identical_addresses != found.allocations:
                wrong.append((name, found))
            assert found.first_difference is None or not found.exact
        assert row["file"] == name
    assert not wrong
    assert allocations == sum(int(row["n_alloc"]) for row in index.values()) > 90_000


@pytest.mark.nightly
def test_files_hold_what_the_index_says(index: dict[str, dict[str, str]], shared_dir: Path) -> None:
    for name, row in index.items():
        snapshot = read_snapshot(shared_dir / "snapshots" / name)
        events = [event for trace in snapshot.traces for event in trace]
        assert len(events) == int(row["n_events"]), name
        assert sum(event.action is Action.OOM for event in events) == int(row["n_oom"]), name
        assert len(snapshot.segments) == int(row["n_segments_end"]), name
        assert sum(segment.size for segment in snapshot.segments) == float(row["reserved_end_MiB"]) * MIB, name
        allocated = sum(
            block.size
            for segment in snapshot.segments
            for block in segment.blocks
            if block.state is BlockState.ALLOCATED
        )
        assert allocated / MIB == pytest.approx(float(row["allocated_end_MiB"]), abs=0.01), name


def test_another_rule_would_be_noticed(
    index: dict[str, dict[str, str]], shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slack of 2 MiB instead of 1 MiB in the large pool, recordings no longer come out."""
    monkeypatch.setattr("memprof.allocator.caching.SPLIT_SLACK", 2 * MIB)
    snapshot = read_snapshot(shared_dir / "snapshots" / "niu_fb_200.pickle")
    assert not all(found.exact for found in replay_snapshot(snapshot))
