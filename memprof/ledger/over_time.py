"""What each category holds over a run, at some of its events: small enough to be kept in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memprof.allocator.rounding import round_size
from memprof.ledger.ledger import Ledger
from memprof.trace.events import EventKind

MOMENTS = 100
LEAST_SHARE = 0.01
"""Of the peak: a category that never takes more is left out."""
FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class OverTime:
    """A run in equal stretches of events, each by the moment at which most of it is allocated. Sizes are bytes."""

    num_events: int
    """Of the whole run."""
    events: tuple[int, ...]
    """The moments, one a stretch, by the index of their event; the peak is among them."""
    allocated_bytes: tuple[int, ...]
    """After each of them."""
    categories: dict[str, tuple[int, ...]]
    """The same by category, the largest first; of those that ever take a hundredth of the peak."""
    most_bytes: dict[str, int]
    """The most that each of these ever takes, at any event."""
    peak_event: int
    refused_event: int | None
    """Of the request that the card refuses."""
    steps: tuple[tuple[int, int], ...]
    """Number and first event of each step."""


def over_time(ledger: Ledger) -> OverTime:
    """The moments of a ledger's run."""
    count, least = len(ledger.allocated), LEAST_SHARE * ledger.peak_bytes
    events = fullest(ledger.allocated, MOMENTS, ledger.peak_event)
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
        refused_event=None if ledger.out_of_memory is None else ledger.out_of_memory.event,
        steps=tuple(begins.items()),
    )


def fullest(allocated: Sequence[int], most: int, peak: int) -> list[int]:
    """One event of each of at most so many equal stretches: the last at which most is allocated, or the peak's."""
    count = len(allocated)
    parts = min(most, count)
    events = []
    for number in range(parts):
        stretch = range(count * number // parts, count * (number + 1) // parts)
        events.append(peak if peak in stretch else max(reversed(stretch), key=allocated.__getitem__))
    return events


def by_category(ledger: Ledger, events: Sequence[int]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Bytes of each category after each of these rising events, and the most that it has after any.

    They sum to what is allocated: what blocks have beyond their tensors' rounded sizes is fragmentation.
    """
    trace, rounds = ledger.trace, ledger.run.rounds
    refused = frozenset(trace.refused)
    now, most, sizes = Counter[str](), Counter[str](), dict[int, int]()
    held: dict[str, list[int]] = {}
    wanted, total = 0, 0
    for time, (happened, ref) in enumerate(trace.events):
        if happened is EventKind.ALLOC:
            storage = trace.storages[ref]
            if storage.device == trace.device and storage.num_bytes and ref not in refused:
                size = sizes[ref] = round_size(storage.num_bytes) if rounds else storage.num_bytes
                name = ledger.categories[ref].value
                total += size
                now[name] += size
                if now[name] > most[name]:
                    most[name] = now[name]
        elif happened is EventKind.FREE and ref in sizes:
            size = sizes.pop(ref)
            total -= size
            now[ledger.categories[ref].value] -= size
        extra = ledger.allocated[time] - total
        if extra > most[FRAGMENTATION]:
            most[FRAGMENTATION] = extra
        if wanted < len(events) and time == events[wanted]:
            for name, amount in {**now, FRAGMENTATION: extra}.items():
                held.setdefault(name, [0] * len(events))[wanted] = amount
            wanted += 1
    return held, {name: most[name] for name in held}
