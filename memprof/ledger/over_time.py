"""Bytes of each category over the course of a run, at so few events that a report can store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memprof.allocator.rounding import round_request
from memprof.ledger.categories import Category
from memprof.ledger.ledger import Ledger
from memprof.trace.events import NONE, EventKind

NUM_MOMENTS = 100
MIN_SHARE = 0.01  # of the peak: categories that never reach this share are omitted
FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class OverTime:
    """A run divided into equal ranges of events, each represented by the event with the most allocated bytes."""

    num_events: int  # Of the whole run.
    events: tuple[int, ...]  # The moments, one per range, as event indices; the peak is among them.
    allocated_bytes: tuple[int, ...]  # After each moment.
    # The same by category, largest first; only categories that reach a hundredth of the peak.
    categories: dict[str, tuple[int, ...]]
    most_bytes: dict[str, int]  # The peak of each of these categories, at any event.
    peak_event: int
    failed_event: int | None  # Of the allocation that fails.
    steps: tuple[tuple[int, int], ...]  # Number and first event of each step.


def build_over_time(ledger: Ledger) -> OverTime:
    """Return the allocated bytes by category at up to `NUM_MOMENTS` events of a run."""
    num_events, min_bytes = len(ledger.allocated), MIN_SHARE * ledger.peak_bytes
    events = select_peak_events(ledger.allocated, NUM_MOMENTS, ledger.peak_event)
    sizes, peaks = sum_by_category(ledger, events)
    names = sorted((name for name in sizes if peaks[name] >= min_bytes), key=lambda name: -peaks[name])
    begins: dict[int, int] = {}
    for span in ledger.spans:
        if span.step:
            begins.setdefault(span.step, span.begin)
    return OverTime(
        num_events=num_events,
        events=tuple(events),
        allocated_bytes=tuple(ledger.allocated[event] for event in events),
        categories={name: tuple(sizes[name]) for name in names},
        most_bytes={name: peaks[name] for name in names},
        peak_event=ledger.peak_event,
        failed_event=None if ledger.out_of_memory is None else ledger.out_of_memory.event,
        steps=tuple(begins.items()),
    )


def select_peak_events(allocated: Sequence[int], max_events: int, peak_event: int) -> list[int]:
    """Return one event for each of at most `max_events` equal ranges of events: `peak_event` in its range, elsewhere
    the last event with the most allocated bytes."""
    num_events = len(allocated)
    num_ranges = min(max_events, num_events)
    result = []
    for i in range(num_ranges):
        events = range(num_events * i // num_ranges, num_events * (i + 1) // num_ranges)
        result.append(peak_event if peak_event in events else max(reversed(events), key=allocated.__getitem__))
    return result


def sum_by_category(ledger: Ledger, events: Sequence[int]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the bytes of each category after each of the ascending `events`, and its peak over all events of the run.
    Categories sum to the allocated bytes: bytes of blocks beyond their tensors' rounded sizes are fragmentation."""
    trace, rounds = ledger.trace, ledger.run.rounds
    failed_storages = ledger.run.refused
    storages, categories, device = trace.storages, ledger.categories, trace.device
    alloc, free = EventKind.ALLOC, EventKind.FREE
    current, peaks, sizes = dict[Category, int](), dict[Category, int](), dict[int, int]()
    curves: dict[str, list[int]] = {}
    event_index, tensor_bytes, max_free = 0, 0, 0
    next_event = events[0] if events else NONE
    for time, ((kind, ref), allocated) in enumerate(zip(trace.events, ledger.allocated, strict=True)):
        if kind is alloc:
            storage = storages[ref]
            num_bytes = storage.num_bytes
            if num_bytes and storage.device == device and ref not in failed_storages:
                size = sizes[ref] = round_request(num_bytes, device) if rounds else num_bytes
                category = categories[ref]
                tensor_bytes += size
                category_bytes = current[category] = current.get(category, 0) + size
                if category_bytes > peaks.get(category, 0):
                    peaks[category] = category_bytes
        elif kind is free and ref in sizes:
            size = sizes.pop(ref)
            tensor_bytes -= size
            current[categories[ref]] -= size
        if allocated - tensor_bytes > max_free:
            max_free = allocated - tensor_bytes
        if time == next_event:
            for name, num_bytes in {
                **{category.value: size for category, size in current.items()},
                FRAGMENTATION: allocated - tensor_bytes,
            }.items():
                curves.setdefault(name, [0] * len(events))[event_index] = num_bytes
            event_index += 1
            next_event = events[event_index] if event_index < len(events) else NONE
    all_peaks = {**{category.value: size for category, size in peaks.items()}, FRAGMENTATION: max_free}
    return curves, {name: all_peaks[name] for name in curves}
