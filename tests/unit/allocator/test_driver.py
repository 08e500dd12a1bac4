"""The simulated GPU: its memory, at the byte, and address space for expandable segments."""

from __future__ import annotations

from memprof.allocator.driver import SimulatedDriver

MIB = 1 << 20


def test_memory_is_taken_in_units_of_2_mebibytes_up_to_the_last() -> None:
    driver = SimulatedDriver(20 * MIB, 6 * MIB)
    assert driver.memory_info() == (14 * MIB, 20 * MIB)
    first = driver.malloc(9 * MIB)
    assert first is not None and driver.memory_info() == (4 * MIB, 20 * MIB)
    assert driver.malloc(4 * MIB + 1) is None and driver.num_refusals == 1
    assert driver.malloc(4 * MIB) is not None and driver.memory_info() == (0, 20 * MIB)
    assert driver.malloc(1) is None and not driver.map(0, 1) and driver.num_refusals == 3
    driver.free(first, 9 * MIB)
    assert (driver.used_bytes, driver.memory_info()) == (4 * MIB, (10 * MIB, 20 * MIB))
    assert driver.map(0, 10 * MIB) and not driver.map(0, 1)
    driver.unmap(0, 3 * MIB)
    assert driver.memory_info() == (3 * MIB, 20 * MIB)


def test_a_gpu_without_limit_has_what_is_used() -> None:
    driver = SimulatedDriver(None, 6 * MIB)
    assert driver.malloc(1 << 50) is not None and driver.map(0, 2 * MIB) and driver.num_refusals == 0
    assert driver.memory_info() == (0, (1 << 50) + 8 * MIB)
    limited = SimulatedDriver(MIB, 2 * MIB)  # more is used by others than there is
    assert limited.memory_info() == (0, MIB) and limited.malloc(1) is None
    limited.lift_limit()
    assert limited.malloc(1) is not None


def test_reservations_do_not_overlap() -> None:
    driver = SimulatedDriver(20 * MIB)
    first = 1 << 40
    assert [driver.reserve(size) for size in (MIB, 40 * MIB, 1)] == [first, first + 2 * MIB, first + 42 * MIB]
    assert driver.memory_info() == (20 * MIB, 20 * MIB)
