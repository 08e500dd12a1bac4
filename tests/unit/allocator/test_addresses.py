"""Where cudaMalloc's memory lies: the rule that was read off recordings on Linux."""

from __future__ import annotations

from memprof.allocator.addresses import AddressSpace

MIB = 1 << 20


def test_addresses_fall_in_chunks_of_32_mebibytes() -> None:
    space = AddressSpace()
    first = space.allocate(32 * MIB)
    assert space.allocate(502 * MIB) == first - 512 * MIB
    assert space.allocate(20 * MIB) == first - 544 * MIB


def test_what_is_left_of_a_chunk_holds_later_requests_the_youngest_first() -> None:
    space = AddressSpace()
    old, young = space.allocate(20 * MIB), space.allocate(20 * MIB)
    assert space.allocate(2 * MIB) == young + 20 * MIB
    assert space.allocate(2 * MIB) == young + 22 * MIB
    assert space.allocate(10 * MIB) == old + 20 * MIB


def test_freed_chunks_are_used_again_from_the_top_of_the_highest_that_is_large_enough() -> None:
    space = AddressSpace()
    blocks = [space.allocate(size * MIB) for size in (64, 32, 64, 32)]
    space.free(blocks[0], 64 * MIB)
    space.free(blocks[2], 64 * MIB)
    assert space.allocate(32 * MIB) == blocks[0] + 32 * MIB
    assert space.allocate(64 * MIB) == blocks[2]


def test_freed_neighbours_become_one_range() -> None:
    space = AddressSpace()
    blocks = [space.allocate(32 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        space.free(block, 32 * MIB)
    assert space.allocate(96 * MIB) == blocks[2]


def test_a_chunk_with_something_in_it_is_not_given_back() -> None:
    space = AddressSpace()
    large = space.allocate(20 * MIB)
    space.allocate(2 * MIB)
    space.free(large, 20 * MIB)
    assert space.allocate(32 * MIB) == large - 32 * MIB  # only 20 MiB of that chunk are free
    assert space.allocate(20 * MIB) == large
