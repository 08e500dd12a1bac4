"""Traces of random programs: all that a trace can say to the allocator, and all that it reads over."""

from __future__ import annotations

import random
from typing import Any

from memprof.allocator import CardMemory, TraceReplay, parse_config
from memprof.trace.events import GPU, EventKind, Trace
from tests.unit.allocator.requests import MIB, SIZES, TOTAL
from tests.unit.allocator.traces import StreamScript

SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max-split": "max_split_size_mb:40",
    "max-split-rounding": "max_split_size_mb:20,max_non_split_rounding_mb:60",
    "divisions": "roundup_power2_divisions:[1:2,16:8,>:4]",
    "gc": "garbage_collection_threshold:0.4,per_process_memory_fraction:0.9",
    "fraction": "per_process_memory_fraction:0.5",
    "large-segment": "large_segment_size_mb:34",
    "expandable-max-split": "expandable_segments:True,max_split_size_mb:40,large_segment_size_mb:12",
}
CARD = CardMemory(TOTAL, 10 * MIB)


def program(seed: int, steps: int = 150) -> Trace:
    """Mostly requests and frees; of the rest, as many kinds as the seed says."""
    r = random.Random(seed)
    script = StreamScript()
    odd = r.choice((0.0, 0.02, 0.1))
    streams = r.choice(((0,), (0, 0, 7), (0, 7, 1 << 47)))
    for _ in range(steps):
        choice = r.random()
        if choice < odd:
            _odd(script, r)
        elif choice < 0.58 or not script.home:
            device = r.choice((GPU, GPU, GPU, GPU, "cuda:1", "cpu"))
            index = script.new(r.choice((0, *SIZES)) + r.choice((0, 0, 1, 777)), device, stream=r.choice(streams))
            if r.random() < odd / 4:
                script.trace.refused.append(index)
        else:
            script.free(r.choice(list(script.home)))
    return script.trace


def _odd(script: StreamScript, r: random.Random) -> None:
    kind = r.choice(("empty", "phase", "use", "wait", "pool", "pool", "retire"))
    if kind == "empty":
        script.empty_cache()
    elif kind == "phase":
        script.add(EventKind.PHASE, 0)
    elif kind == "use" and script.home:
        script.use(r.choice(list(script.home)), r.choice((0, 7, 9)))
    elif kind == "wait":
        script.wait(r.choice((7, 9)), by_host=r.random() < 0.5)
    elif kind == "pool":
        script.add(EventKind.POOL, r.choice((0, 1, 2)))
    elif kind == "retire":
        script.add(EventKind.POOL, 0)
        script.add(EventKind.POOL_FREE, 1)


def history(trace: Trace, text: str, card: CardMemory | None, parts: list[int], *, writes: bool) -> list[Any]:
    """All that there is to say of a replay after each of the events `parts`, and at its end."""
    replay = TraceReplay(trace, card, parse_config(text))
    found = []
    for end in (*sorted(parts), None):
        (replay.advance if writes else replay.skip)(end)
        found.append(_state(replay))
    return [*found, replay.finish()]


def _state(replay: TraceReplay) -> list[Any]:
    allocator, driver = replay.allocator, replay.driver
    lists = {
        (number, sized.is_small, stream): tuple(
            map(sorted, (owner.keys, owner.blocks, owner.unmapped, owner.unmapped_blocks))
        )
        for number, pool in allocator.pools.items()
        for sized in (pool.small, pool.large)
        for stream, owner in sized.streams.items()
    }
    live = [
        (ref, block.address, block.size, block.requested, block.uses, block.events)
        for ref, block in replay.live.items()
    ]
    held = (driver.used_bytes, driver.refusals, allocator.segment_store.total_bytes)
    timeline = replay.timeline
    columns = [list(column) for column in (timeline.requested, timeline.allocated, timeline.reserved)]
    given = (list(timeline.blocks.items()), list(timeline.addresses.items()))
    facts = (timeline.peak_reserved, timeline.first_oom, replay.event, replay.stream, replay.pool)
    return [lists, live, held, columns, given, facts, allocator.stats(), allocator.segments()]
