"""Where cudaMalloc's memory lies: the rule that was read off recordings on Linux."""

from __future__ import annotations

from memprof.allocator.addresses import AddressSpace

MIB = 1 << 20


def test_addresses_fall_in_chunks_of_32_mebibytes() -> None:
    space = AddressSpace()
    first = space.allocate(32 * MIB)
    assert first == 0x7F0000000000 - 32 * MIB
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


def test_of_the_free_ranges_of_a_chunk_the_lowest_that_is_large_enough() -> None:
    space = AddressSpace()
    first, _, third = (space.allocate(size * MIB) for size in (4, 10, 4))
    space.free(first, 4 * MIB)
    assert space.allocate(10 * MIB) == third + 4 * MIB
    assert space.allocate(4 * MIB) == first
    assert space.allocate(4 * MIB) == third + 14 * MIB  # the last 4 MiB
    assert space.allocate(2 * MIB) == first - 32 * MIB


def lost_a_large_request() -> tuple[AddressSpace, int, int]:
    """Two ranges of 64 MiB, of which 40 are free: their addresses, the older first."""
    space = AddressSpace()
    addresses = []
    for _ in range(2):
        addresses.append(space.allocate(40 * MIB))
        space.allocate(24 * MIB)
    for address in addresses:
        space.free(address, 40 * MIB)
    return space, *addresses


def test_ranges_with_more_room_than_a_chunk() -> None:
    for size in (36, 40):
        space, old, young = lost_a_large_request()
        assert space.allocate(size * MIB) == young and space.allocate(size * MIB) == old
        assert space.allocate(size * MIB) == young - 64 * MIB
    space, old, young = lost_a_large_request()
    assert space.allocate(42 * MIB) == young - 64 * MIB


def test_the_youngest_range_whatever_its_room() -> None:
    space, _, young = lost_a_large_request()
    youngest = space.allocate(50 * MIB)  # a third range, of which 14 MiB are left
    assert space.allocate(14 * MIB) == youngest + 50 * MIB
    assert space.allocate(14 * MIB) == young
    space = AddressSpace()
    small = space.allocate(20 * MIB)
    large = space.allocate(40 * MIB)
    space.allocate(24 * MIB)
    space.free(large, 40 * MIB)
    assert space.allocate(12 * MIB) == large and space.allocate(28 * MIB) == large + 12 * MIB
    assert space.allocate(12 * MIB) == small + 20 * MIB


def test_the_rest_of_a_freed_range_is_used_again_too() -> None:
    space = AddressSpace()
    first, second = space.allocate(96 * MIB), space.allocate(32 * MIB)
    space.free(first, 96 * MIB)
    assert space.allocate(32 * MIB) == first + 64 * MIB
    assert space.allocate(64 * MIB) == first
    assert space.allocate(32 * MIB) == second - 32 * MIB
