"""Compare what torch's profiler and memprof see of a program's memory with what torch's allocator wrote down itself.

python -m tests.gpu.kineto --device cuda --out FILE.json training inference ...

Each pattern (patterns.py) runs under the profiler alone in three ways: plain, inside a `record_function`, and with
stacks; and under memprof. On the CPU there is no history to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memprof.measured import MeasuredDevice
from memprof.trace.events import HOST, EventKind, Trace
from tests.gpu.attempt import attempt
from tests.gpu.history import AllocatorHistory
from tests.gpu.patterns import PATTERNS

Pattern = Callable[[str], None]


class Counters:
    """torch's own counters around a run; all None on the CPU, where there are none."""

    def __init__(self, device: str) -> None:
        self._has_counters = device == "cuda"
        gc.collect()
        if self._has_counters:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated() if self._has_counters else 0

    def left_bytes(self) -> int | None:
        """Return the bytes that were allocated since the beginning and are not freed."""
        return torch.cuda.memory_allocated() - self._before if self._has_counters else None

    def peak_bytes(self) -> int | None:
        """Return the most bytes since the beginning, beyond those that were allocated then."""
        return torch.cuda.max_memory_allocated() - self._before if self._has_counters else None


class TreeAllocation(NamedTuple):
    """An allocation, or with negative bytes a free, in the profiler's tree of events."""

    time_ns: int
    address: int
    num_bytes: int
    thread: int
    has_parent: bool


def in_tree(tree: list[Any], device: str) -> list[TreeAllocation]:
    """Return the allocations and frees on the device, by time."""

    def walk(nodes: list[Any], has_parent: bool) -> Iterator[TreeAllocation]:
        for node in nodes:
            fields = node.extra_fields
            if node.typed[0].name == "Allocation" and str(fields.device).startswith(device):
                yield TreeAllocation(node.start_time_ns, fields.ptr, fields.alloc_size, node.start_tid, has_parent)
            yield from walk(node.children, True)

    return sorted(walk(tree, False))


def seen_by_profiler(pattern: Pattern, device: str, root: bool = False, stacks: bool = False) -> dict[str, Any]:
    """Run a pattern under the profiler and the history.

    Args:
        pattern: what runs.
        device: "cuda" or "cpu".
        root: inside a `record_function`, so that every event of this thread has a parent.
        stacks: with Python's stacks.

    Returns:
        How many allocations and frees there are in the history, in the profiler's flat list and in its tree, and
        whether the tree's are those of the history.
    """
    pattern(device)  # what is taken once, as workspaces are, is no part of it
    counters = Counters(device)
    activities = [ProfilerActivity.CPU]
    with (
        AllocatorHistory(device) as history,
        profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=stacks) as profiled,
        record_function("run") if root else contextlib.nullcontext(),
    ):
        pattern(device)
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    flat = [
        event.nbytes()
        for event in results.events()
        if event.name() == "[memory]" and event.device_type().name == device.upper()
    ]
    tree = in_tree(results.experimental_event_tree(), device)
    allocated = [(one.address, one.num_bytes) for one in tree if one.num_bytes > 0]
    return {
        **against_history(history, allocated, device),
        "flat_allocations": sum(num_bytes > 0 for num_bytes in flat),
        "flat_frees": sum(num_bytes < 0 for num_bytes in flat),
        "tree_allocations": len(allocated),
        "tree_frees": sum(one.num_bytes < 0 for one in tree),
        "tree_without_parent": sum(not one.has_parent for one in tree),
        "tree_by_thread": sorted(Counter(one.thread for one in tree).values()),
        "left_by_tree": sum(one.num_bytes for one in tree),
        "left_by_torch": counters.left_bytes(),
        "peak_by_torch": counters.peak_bytes(),
    }


def against_history(history: AllocatorHistory, allocated: list[tuple[int, int]], device: str) -> dict[str, Any]:
    """Compare addresses and bytes of the tree's allocations with the history's; nothing on the CPU, which has none."""
    if device != "cuda":
        return {}
    requested = [(entry.address, entry.num_bytes) for entry in history.entries if entry.action == "alloc"]
    return {
        "history_allocations": len(requested),
        "history_frees": len(history.bytes_of("free_requested")),
        "same_addresses_in_order": [address for address, _ in requested] == [address for address, _ in allocated],
        "other_bytes_than_requested": sum(a[1] != b[1] for a, b in zip(requested, allocated, strict=False)),
    }


def seen_by_memprof(pattern: Pattern, device: str) -> dict[str, Any]:
    """Run a pattern under memprof: what its trace holds at the end and at most, beside torch's counters."""
    pattern(device)
    counters = Counters(device)
    measured = MeasuredDevice(device)
    with measured:
        pattern(device)
    left, peak = held_bytes(measured.trace)
    sampled = [sample.peak_allocated_bytes for sample in measured.trace.samples]
    return {
        "left_by_trace": left,
        "left_by_torch": counters.left_bytes(),
        "peak_by_trace": peak,
        "peak_by_torch": counters.peak_bytes(),
        "peak_of_samples": max((num_bytes for num_bytes in sampled if num_bytes is not None), default=None),
        "phases": len(measured.trace.phases),
        "error": None if measured.error is None else str(measured.error),
        "assumptions": [str(one) for one in measured.trace.assumptions],
    }


def held_bytes(trace: Trace) -> tuple[int, int]:
    """Return the bytes on the device at the end of a trace, and at most."""
    held = most = 0
    for event in trace.events:
        if event.kind not in (EventKind.ALLOC, EventKind.FREE) or trace.storages[event.ref].device == HOST:
            continue
        num_bytes = trace.storages[event.ref].num_bytes
        held += num_bytes if event.kind is EventKind.ALLOC else -num_bytes
        most = max(most, held)
    return held, most


def compare(pattern: Pattern, device: str) -> dict[str, Any]:
    """Run one pattern in all four ways."""
    return {
        "plain": attempt(lambda: seen_by_profiler(pattern, device)),
        "root": attempt(lambda: seen_by_profiler(pattern, device, root=True)),
        "stacks": attempt(lambda: seen_by_profiler(pattern, device, stacks=True)),
        "memprof": attempt(lambda: seen_by_memprof(pattern, device)),
    }


def line(name: str, found: dict[str, dict[str, Any]]) -> str:
    """Describe in a line what was found of a pattern: allocations/frees by each way, peaks in bytes."""
    ways = []
    for way, one in found.items():
        if one.get("error"):
            ways.append(f"{way}: {one['error']}")
        elif way == "memprof":
            ways.append(f"memprof: peak {one['peak_by_trace']}, by torch {one['peak_by_torch']}")
        else:
            history = f"history {one['history_allocations']}/{one['history_frees']}, " if "history_frees" in one else ""
            ways.append(f"{way}: {history}tree {one['tree_allocations']}/{one['tree_frees']}")
    return f"{name}: {'; '.join(ways)}"


def main() -> None:
    """Compare the patterns that are named; print and write each as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kineto", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="+", choices=PATTERNS, metavar="PATTERN")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = {}
    for name in asked.patterns:
        found[name] = compare(PATTERNS[name], asked.device)
        asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(line(name, found[name]), flush=True)


if __name__ == "__main__":
    main()
