"""Bytes of each category over the course of a run, at so few events that a report can store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memprof.allocator.rounding import round_size
from memprof.ledger.categories import Category
from memprof.ledger.ledger import Ledger
from memprof.trace.events import NONE, EventKind

MOMENTS = 100
LEAST_SHARE = 0.01  # of the peak: categories that never reach this share are omitted
FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class OverTime:
    """A run in equal stretches of events, each represented by its highest allocated moment. Sizes are bytes."""

    num_events: int  # Of the whole run.
    events: tuple[int, ...]  # The moments, one per stretch, as event indices; the peak is among them.
    allocated_bytes: tuple[int, ...]  # After each moment.
    # The same by category, largest first; only categories that reach a hundredth of the peak.
    categories: dict[str, tuple[int, ...]]
    most_bytes: dict[str, int]  # The peak of each of these categories, at any event.
    peak_event: int
    failed_event: int | None  # Of the allocation that fails.
    steps: tuple[tuple[int, int], ...]  # Number and first event of each step.


def over_time(ledger: Ledger) -> OverTime:
    """Return the moments of a ledger's run."""
    count, least = len(ledger.allocated), LEAST_SHARE * ledger.peak_bytes
    events = peak_events(ledger.allocated, MOMENTS, ledger.peak_event)
    held, most = by_category(ledger, events)
    names = sorted((name for name in held if most[name] >= least), key=lambda name: -most[name])
    begins: dict[int, int] = {}
    for span in ledger.spans:
        if span.step:
            begins.setdefault(span.step, span.begin)
    return OverTime(
        num_events=count,
        events=tuple(events),
        allocated_bytes=tuple(ledger.allocated[event] for event in events),
        categories={name: tuple(held[name]) for name in names},
        most_bytes={name: most[name] for name in names},
        peak_event=ledger.peak_event,
        failed_event=None if ledger.out_of_memory is None else ledger.out_of_memory.event,
        steps=tuple(begins.items()),
    )


def peak_events(allocated: Sequence[int], most: int, peak: int) -> list[int]:
    """Return one event for each of at most `most` equal stretches: the last with the most allocated, or the peak's."""
    count = len(allocated)
    parts = min(most, count)
    events = []
    for number in range(parts):
        stretch = range(count * number // parts, count * (number + 1) // parts)
        events.append(peak if peak in stretch else max(reversed(stretch), key=allocated.__getitem__))
    return events


def by_category(ledger: Ledger, events: Sequence[int]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the bytes of each category after each of the rising `events`, and the category's peak over all events.

    The categories sum to the allocated bytes: bytes of blocks beyond their tensors' rounded sizes are fragmentation.
    """
    trace, rounds = ledger.trace, ledger.run.rounds
    refused = ledger.run.refused
    storages, categories, device = trace.storages, ledger.categories, trace.device
    alloc, freed = EventKind.ALLOC, EventKind.FREE
    now, most, sizes = dict[Category, int](), dict[Category, int](), dict[int, int]()
    held: dict[str, list[int]] = {}
    column, total, most_extra = 0, 0, 0
    next_event = events[0] if events else NONE
    for time, ((kind, ref), allocated) in enumerate(zip(trace.events, ledger.allocated, strict=True)):
        if kind is alloc:
            storage = storages[ref]
            num_bytes = storage.num_bytes
            if num_bytes and storage.device == device and ref not in refused:
                size = sizes[ref] = round_size(num_bytes) if rounds else num_bytes
                category = categories[ref]
                total += size
                has = now[category] = now.get(category, 0) + size
                if has > most.get(category, 0):
                    most[category] = has
        elif kind is freed and ref in sizes:
            size = sizes.pop(ref)
            total -= size
            now[categories[ref]] -= size
        if allocated - total > most_extra:
            most_extra = allocated - total
        if time == next_event:
            for name, amount in {
                **{one.value: has for one, has in now.items()},
                FRAGMENTATION: allocated - total,
            }.items():
                held.setdefault(name, [0] * len(events))[column] = amount
            column += 1
            next_event = events[column] if column < len(events) else NONE
    peaks = {**{one.value: has for one, has in most.items()}, FRAGMENTATION: most_extra}
    return held, {name: peaks[name] for name in held}
