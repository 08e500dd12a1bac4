"""Where cudaMalloc's memory lies: the rule that was read off recordings on Linux."""

from __future__ import annotations

from memprof.allocator.addresses import AddressSpace

MIB = 1 << 20


def test_addresses_fall_in_chunks_of_32_mebibytes() -> None:
    space = AddressSpace()
    first = space.take(32 * MIB)
    assert space.take(502 * MIB) == first - 512 * MIB
    assert space.take(20 * MIB) == first - 544 * MIB


def test_what_is_left_of_a_chunk_holds_later_requests_the_youngest_first() -> None:
    space = AddressSpace()
    old, young = space.take(20 * MIB), space.take(20 * MIB)
    assert space.take(2 * MIB) == young + 20 * MIB
    assert space.take(2 * MIB) == young + 22 * MIB
    assert space.take(10 * MIB) == old + 20 * MIB


def test_freed_chunks_are_used_again_from_the_top_of_the_highest_that_is_large_enough() -> None:
    space = AddressSpace()
    blocks = [space.take(size * MIB) for size in (64, 32, 64, 32)]
    space.give_back(blocks[0], 64 * MIB)
    space.give_back(blocks[2], 64 * MIB)
    assert space.take(32 * MIB) == blocks[0] + 32 * MIB
    assert space.take(64 * MIB) == blocks[2]


def test_freed_neighbours_become_one_range() -> None:
    space = AddressSpace()
    blocks = [space.take(32 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        space.give_back(block, 32 * MIB)
    assert space.take(96 * MIB) == blocks[2]


def test_a_chunk_with_something_in_it_is_not_given_back() -> None:
    space = AddressSpace()
    large = space.take(20 * MIB)
    space.take(2 * MIB)
    space.give_back(large, 20 * MIB)
    assert space.take(32 * MIB) == large - 32 * MIB  # only 20 MiB of that chunk are free
    assert space.take(20 * MIB) == large
