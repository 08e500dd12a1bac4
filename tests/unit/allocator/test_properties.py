"""Random requests under every kind of setting: what must hold of any allocator's state, recounted from its blocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.allocator import CachingAllocator, Completion, OutOfMemory, parse_config
from tests.lanes import examples
from tests.unit.allocator.requests import SETTINGS, SIZES, TOTAL

ALL_SETTINGS = {**SETTINGS, "throw": "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"}
GRAPH = (0, 1)


class Program:
    """Does random things to an allocator and recounts its state after each."""

    def __init__(self, text: str, completion: Completion, seed: int) -> None:
        self.allocator = CachingAllocator(TOTAL, parse_config(text), completion=completion)
        self.allocator.create_pool(GRAPH)
        self.random = random.Random(seed)
        self.live: list = []
        self.pending: list = []
        self.peaks: dict[str, int] = {}

    def step(self) -> None:
        r, allocator = self.random, self.allocator
        choice = r.random()
        if choice < 0.55:
            size = r.choice(SIZES) + r.choice((0, 0, 1, 777))
            try:
                pool = GRAPH if r.random() < 0.15 else (0, 0)
                block = allocator.malloc(size, r.choice((0, 0, 0, 5)), pool)
            except OutOfMemory as error:
                report = error.report
                assert report.reserved_bytes == allocator.counters.reserved_bytes
                assert report.free_bytes == TOTAL - allocator.counters.reserved_bytes
            else:
                assert block.requested == size <= block.size
                assert block not in self.live
                self.live.append(block)
        elif choice < 0.93 and self.live:
            block = self.live.pop(r.randrange(len(self.live)))
            if r.random() < 0.1:
                allocator.record_stream(block, r.choice((0, 5, 9)))
            allocator.free(block)
        else:
            allocator.empty_cache()

    def check(self) -> None:
        allocator = self.allocator
        segments = allocator.segments()
        expected = {name: dict.fromkeys(("all", "small_pool", "large_pool"), 0) for name in COUNTED}
        at = 0
        for segment in segments:
            assert segment.address >= at, "segments overlap"
            at = segment.address
            free_before = False
            kind = "small_pool" if segment.is_small else "large_pool"
            for block in segment.blocks:
                assert block.address == at and block.size > 0 and block.size % 512 == 0
                at += block.size
                free = block.state == "inactive"
                assert not (free and free_before), "free neighbours"
                free_before = free
                split = len(segment.blocks) > 1 and not segment.expandable
                for name, amount in {
                    "reserved_bytes": block.size,
                    "allocation": block.state == "active_allocated",
                    "allocated_bytes": block.size * (block.state == "active_allocated"),
                    "active": not free,
                    "active_bytes": block.size * (not free),
                    "requested_bytes": block.requested,
                    "inactive_split": free and split,
                    "inactive_split_bytes": block.size * (free and split),
                }.items():
                    expected[name][kind] += amount
                    expected[name]["all"] += amount
            assert at == segment.address + segment.size, "blocks do not tile the segment"
            if not segment.expandable:
                expected["segment"][kind] += 1
                expected["segment"]["all"] += 1
        stats = allocator.stats()
        for name, values in expected.items():
            for kind, value in values.items():
                key = f"{name}.{kind}"
                assert stats[f"{key}.current"] == value, key
                assert stats[f"{key}.allocated"] - stats[f"{key}.freed"] == value, key
                self.peaks[key] = max(self.peaks.get(key, 0), value)
                if name in ("reserved_bytes", "segment", "inactive_split", "inactive_split_bytes"):
                    assert stats[f"{key}.peak"] >= self.peaks[key], key  # may be higher within a step
                else:
                    assert stats[f"{key}.peak"] == self.peaks[key], key
        counters = allocator.counters
        assert counters.requested_bytes <= counters.active_bytes <= counters.reserved_bytes <= TOTAL
        assert counters.allocated_bytes <= counters.active_bytes
        assert allocator.driver.used_bytes == allocator.segment_store.total_bytes == counters.reserved_bytes
        addresses = {block.address: block.size for segment in segments for block in segment.blocks}
        assert all(addresses[block.address] == block.size for block in self.live)
        # Free blocks are found by size: the lists hold just these.
        listed = sorted(
            (block.address, block.size)
            for pool in allocator.pools.values()
            for sized in (pool.small, pool.large)
            for block in sized.list_free_blocks()
        )
        free = sorted((b.address, b.size) for s in segments for b in s.blocks if b.state == "inactive")
        assert listed == free


COUNTED = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


@pytest.mark.parametrize("completion", list(Completion))
@pytest.mark.parametrize("text", ALL_SETTINGS.values(), ids=ALL_SETTINGS.keys())
@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=7)
def test_random_program(text, completion, seed):
    program = Program(text, completion, seed)
    for _ in range(80):
        program.step()
        program.check()
    # Everything released leaves nothing but the private pool's segments.
    for block in program.live:
        program.allocator.free(block)
    program.allocator.empty_cache()
    left = program.allocator.segments()
    assert all(segment.pool_id == GRAPH and not segment.allocated for segment in left)
    assert program.allocator.driver.used_bytes == sum(segment.size for segment in left)


@pytest.mark.parametrize("text", ALL_SETTINGS.values(), ids=ALL_SETTINGS.keys())
def test_same_requests_same_addresses(text):
    def addresses() -> list[int]:
        program = Program(text, Completion.IMMEDIATE, 7)
        for _ in range(300):
            program.step()
        return [block.address for block in program.live]

    assert addresses() == addresses()
