"""What a run is likely to need at another batch or length, from runs at two others: where a search looks next.

Nothing of it is ever shown. What a search ends with was run.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from memprof.allocator import CardMemory, Needs, Settings, needs_of
from memprof.trace.events import Storage, Trace


def likely_needs(made: Mapping[int, Trace], number: int) -> Needs | None:
    """What the run at `number` needs, from the two of `made` that are nearest to it; None: there are not two.

    Each request grows in a straight line. They come in the order of the nearest run, also where others have more of
    them, as a loss has that is computed in pieces.
    """
    nearest = sorted(made, key=lambda one: abs(one - number))[:2]
    if len(nearest) < 2:
        return None
    one, two = nearest
    trace = made[one]
    facts = trace.facts
    settings = Settings.from_facts(facts.allocator)
    grown = _grown(trace, made[two], (number - one) / (two - one))
    guessed, card = dataclasses.replace(trace, storages=grown), CardMemory.of(facts.device)
    needs = needs_of(guessed, card, settings.config, settings.release)
    if needs.fits or settings.config.expandable_segments:
        return needs
    # As it is run: what does not fit is looked at with these too.
    other = needs_of(guessed, card, dataclasses.replace(settings.config, expandable_segments=True), settings.release)
    return other if other.fits else needs


def _grown(trace: Trace, other: Trace, share: float) -> list[Storage]:
    """The storages of `trace`, of which each is by `share` of the way where its like in `other` is."""
    like = other.storages if len(other.storages) == len(trace.storages) else _likes(trace, other)
    return [
        one
        if one.num_bytes == its.num_bytes
        else one._replace(num_bytes=max(round(one.num_bytes + share * (its.num_bytes - one.num_bytes)), 0))
        for one, its in zip(trace.storages, like, strict=True)
    ]


def _likes(trace: Trace, other: Trace) -> Iterator[Storage]:
    """For each storage of `trace` that of `other` which has its place among those of its operator, module and phase."""
    alike: dict[tuple[object, ...], list[Storage]] = defaultdict(list)
    for storage in other.storages:
        alike[_key(other, storage)].append(storage)
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    for storage in trace.storages:
        key = _key(trace, storage)
        found = alike.get(key, [storage])
        yield found[min(seen[key], len(found) - 1)]
        seen[key] += 1


def _key(trace: Trace, storage: Storage) -> tuple[object, ...]:
    return trace.ops[storage.op], storage.module, storage.phase, storage.dtype, storage.hidden
