"""Both sides of the comparison with the CPU: allocations and frees of a program, really run and on the virtual GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from memprof.device.catalog import find_gpu
from memprof.trace.events import HOST, EventKind, Trace
from memprof.virtual import VirtualGpu
from memprof.watch.collection import disable_garbage_collection

BEFORE = -1  # The block of a free whose allocation came before the recording.
OF_A_THREAD = "another thread"


class Call(NamedTuple):
    """One operator that ran on the CPU: its name, sizes and strides of its tensor arguments (None for another one)."""

    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    number: int  # Which call it is, so that two calls of one operator are told apart.


class Change(NamedTuple):
    """One allocation or free: `block` is the number of the allocation, counted from 0."""

    free: bool
    block: int
    num_bytes: int
    op: str
    calls: tuple[Call, ...] = ()  # The operators inside which it happened, outermost first (CPU only).
    given: bool = False  # The block was given to another thread, which may be the last to let go of it (CPU only).


def call_of(node: Any, number: int) -> Call:
    """The operator of a node of the profiler's event tree; `number` is its place among those of the run."""
    inputs = node.extra_fields.inputs
    shapes, strides = (
        tuple(tuple(getattr(one, what)) if hasattr(one, what) else None for one in inputs)
        for what in ("sizes", "strides")
    )
    return Call(node.name, shapes, strides, number)


Program = Callable[[str], Callable[[], None]]  # Builds everything on a device and returns what is to be recorded.


def on_virtual_gpu(program: Program, shared: Callable[[str, str], bool]) -> list[Change]:
    """The changes on the virtual GPU.

    Of the memory that no tensor shows, only that for which `shared` says so, given the operator and the dtype of the
    last tensor made before it.
    """
    gc.collect()
    with disable_garbage_collection(), VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        step = program("cuda")
        begin = len(gpu.trace.events)
        step()
        end = len(gpu.trace.events)
    return recorded_changes(gpu.trace, begin, end, shared)


def recorded_changes(trace: Trace, begin: int, end: int, shared: Callable[[str, str], bool]) -> list[Change]:
    """Those of a trace's events from `begin` to `end` that are of a GPU; `shared` as above."""
    changes: list[Change] = []
    blocks: dict[int, int] = {}
    visible = -1
    made_after = []
    for index, storage in enumerate(trace.storages):
        visible = visible if storage.hidden else index
        made_after.append(visible)
    for event in trace.events[begin:end]:
        if event.kind not in (EventKind.ALLOC, EventKind.FREE):
            continue
        storage = trace.storages[event.ref]
        if storage.device == HOST:
            continue
        if storage.hidden and not shared(trace.op(storage), trace.storages[made_after[event.ref]].dtype):
            continue
        free = event.kind is EventKind.FREE
        if not free:
            blocks[event.ref] = len(blocks)
        changes.append(Change(free, blocks.get(event.ref, BEFORE), storage.num_bytes, trace.op(storage)))
    return changes


def on_cpu(program: Program) -> list[Change]:
    """The changes of the CPU allocator, as torch's profiler sees them, while `program` really runs: no mode is active.

    oneDNN is off: what its convolutions take depends on the CPU.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels keep scratch memory per thread
    gc.collect()
    try:
        with disable_garbage_collection(), torch.backends.mkldnn.flags(enabled=False):
            step = program("cpu")
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as recorded:
                step()
    finally:
        torch.set_num_threads(threads)
    return changes_of(recorded)


def changes_of(recorded: profile) -> list[Change]:
    """All that torch's profiler saw, in order. What another thread than the program's makes has OF_A_THREAD as its
    outermost operator.

    The profiler does not see what the threads of a process group do: of a block that was given to them, a free is
    missing where they were last, or it is that of what they made at the same address.
    """
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    found: list[tuple[int, int, int, tuple[Call, ...]]] = []  # time, bytes (0: given away), address, calls
    number = 0

    def walk(node: Any, calls: tuple[Call, ...]) -> None:
        nonlocal number
        if node.typed[0].name == "Allocation":
            found.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, calls))
        elif node.name.startswith(("aten::", "c10d::")):
            number += 1
            calls = (*calls, call_of(node, number))
            if node.name.startswith("c10d::"):
                found.extend(
                    (node.start_time_ns, 0, address, calls) for address in _addresses(node.extra_fields.inputs)
                )
        for child in node.children:
            walk(child, calls)

    roots = recorded.profiler.kineto_results.experimental_event_tree()
    thread = min(roots, key=lambda root: root.start_time_ns).start_tid
    for root in roots:
        walk(root, () if root.start_tid == thread else (Call(OF_A_THREAD, (), (), -root.start_tid),))
    found.sort(key=lambda change: change[0])
    changes: list[Change] = []
    blocks: dict[int, int] = {}
    given = set()
    count = 0
    for _, num_bytes, address, calls in found:
        op = calls[-1].name if calls else ""
        if not num_bytes:
            given.add(blocks.get(address, BEFORE))
        elif num_bytes > 0:
            blocks[address] = count
            changes.append(Change(False, count, num_bytes, op, calls))
            count += 1
        else:
            changes.append(Change(True, blocks.pop(address, BEFORE), -num_bytes, op, calls))
    return [change._replace(given=change.block in given - {BEFORE}) for change in changes]


def _addresses(inputs: Any) -> Iterator[int]:
    """Where the storages of the tensors begin that stand in `inputs`, or in lists there."""
    for one in inputs:
        if isinstance(one, list):
            yield from _addresses(one)
        elif address := getattr(one, "storage_data_ptr", None):
            yield address
