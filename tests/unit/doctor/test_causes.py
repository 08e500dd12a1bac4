"""The cause that the sizes of a message show: each threshold just below, at, and just above it."""

from __future__ import annotations

import pytest

from memprof.doctor.causes import (
    find_cause,
    find_outside_size,
    find_own_bytes,
    list_other_processes,
    sum_other_processes,
)
from memprof.doctor.diagnosis import Cause, MessageSizes
from memprof.doctor.message_sizes import format_size

GIB = 1 << 30
BYTE = 2**-30  # in GiB
CONTEXT = 426 / 1024  # of a process, where only torch's memory is known


def sizes(others: dict[int, float] | None = None, **gib: float) -> MessageSizes:
    """The sizes in GiB, each exact."""
    exact = {name: format_size(int(value * GIB)) for name, value in gib.items()}
    listed = tuple((pid, format_size(int(value * GIB))) for pid, value in (others or {}).items())
    return MessageSizes(others=listed, **exact)


THRESHOLDS = [
    # The program's own limit: what torch has and the request, together.
    (sizes(tried=10, total=100, process=100, free=0, reserved=40, allowed=50), Cause.GPU_FULL),
    (sizes(tried=10 + BYTE, total=100, process=100, free=0, reserved=40, allowed=50), Cause.MEMORY_LIMIT),
    (sizes(tried=10 + BYTE, total=100, process=100, free=0, allocated=40, allowed=50), Cause.MEMORY_LIMIT),
    (sizes(tried=60, total=100, process=100, free=0, allowed=50), Cause.LARGE_TENSOR),
    # Nothing is known of the GPU.
    (sizes(tried=60), Cause.DEVICE_MEMORY),
    (sizes(tried=60, total=0), Cause.DEVICE_MEMORY),
    (sizes(total=100, free=0), Cause.DEVICE_MEMORY),
    # As much as was requested is free, and a twentieth of the GPU.
    (sizes(tried=5, total=100, free=5), Cause.FREE_REFUSED),
    (sizes(tried=5 + BYTE, total=100, free=5), Cause.GPU_FULL),
    (sizes(tried=1, total=100, free=5 - BYTE), Cause.GPU_FULL),
    # Without other processes the request would fit; they have a GiB.
    (sizes(tried=20, total=100, free=0, process=80), Cause.OTHER_PROCESSES),
    (sizes(tried=20 + BYTE, total=100, free=0, process=80), Cause.GPU_FULL),
    (sizes(tried=24, total=100, free=4, process=76), Cause.OTHER_PROCESSES),
    (sizes(tried=0.5, total=100, free=0, process=99), Cause.OTHER_PROCESSES),
    (sizes(tried=0.5, total=100, free=0, process=99 + BYTE), Cause.GPU_FULL),
    # What is not the process's by subtraction has to be a tenth of the GPU.
    (sizes(tried=1, total=100, free=0, reserved=90 - CONTEXT), Cause.OTHER_PROCESSES),
    (sizes(tried=1, total=100, free=0, reserved=90 - CONTEXT + BYTE), Cause.GPU_FULL),
    (sizes(tried=1, total=100, free=0, allocated=90 - CONTEXT), Cause.OTHER_PROCESSES),
    # A quarter of it, if it is small, or if the request would fit what torch holds.
    (sizes(tried=1, total=8, free=0, reserved=7 - CONTEXT), Cause.OTHER_PROCESSES),
    (sizes(tried=1, total=8 - BYTE, free=0, reserved=7 - BYTE - CONTEXT), Cause.GPU_FULL),
    (sizes(tried=1, total=4, free=0, reserved=3 - CONTEXT), Cause.OTHER_PROCESSES),
    (sizes(tried=1, total=100, free=0, reserved=75 - CONTEXT, allocated=74 - CONTEXT), Cause.OTHER_PROCESSES),
    (sizes(tried=1, total=100, free=0, reserved=75 - CONTEXT + BYTE, allocated=74 - CONTEXT), Cause.GPU_FULL),
    # Processes that the message lists have it for certain.
    (sizes(tried=1, total=100, free=0, reserved=90, others={7: 1}), Cause.OTHER_PROCESSES),
    (sizes(tried=1, total=100, free=0, reserved=90, others={7: 1 - BYTE}), Cause.GPU_FULL),
    # Torch holds enough that is unused, and a tenth of what it holds.
    (sizes(tried=8, total=100, free=0, process=100, reserved=80, allocated=72), Cause.FRAGMENTATION),
    (sizes(tried=8 + BYTE, total=100, free=0, process=100, reserved=80, allocated=72), Cause.GPU_FULL),
    (sizes(tried=10, total=100, free=2, process=98, reserved=80, allocated=72), Cause.FRAGMENTATION),
    (sizes(tried=8, total=100, process=100, reserved=80, allocated=72), Cause.FRAGMENTATION),
    (sizes(tried=8 + BYTE, total=100, process=100, reserved=80, allocated=72), Cause.GPU_FULL),
    (sizes(tried=1, total=100, free=0, process=100, reserved=80, allocated=72 + BYTE), Cause.GPU_FULL),
    # No figure of what is free: a tenth of the GPU is not this process's.
    (sizes(tried=10, total=100, reserved=80 - CONTEXT - BYTE), Cause.DEVICE_MEMORY),
    (sizes(tried=10, total=100, reserved=80 - CONTEXT), Cause.GPU_FULL),
    # A quarter of the GPU in one request.
    (sizes(tried=25, total=100, free=0, process=100), Cause.LARGE_TENSOR),
    (sizes(tried=25 - BYTE, total=100, free=0, process=100), Cause.GPU_FULL),
]


def test_the_cause_at_its_threshold():
    for figures, cause in THRESHOLDS:
        assert find_cause(figures)[0] is cause


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (sizes(tried=100, total=100, free=0, process=100), "is 100% of the GPU"),
        (sizes(tried=100 + BYTE, total=100, free=0, process=100), "larger than the GPU"),
        (sizes(tried=25, total=100, free=0, process=100), "is 25% of the GPU"),
        (sizes(tried=20, total=100, free=0, process=79), "other processes have 21.00 GiB"),
        (sizes(tried=10, total=100, free=3, process=97, reserved=80, allocated=72), "8.00 GiB unused, beside 3.00 GiB"),
        (sizes(tried=8, total=100, free=1, process=99, reserved=80, allocated=72), "8.00 GiB unused, in pieces"),
        (sizes(tried=10, total=100, reserved=70 - CONTEXT), "30.00 GiB of the GPU are not this process's"),
        # 5 of 90 GiB are unused, and 2 of the 3 requested are missing.
        (sizes(tried=3, total=100, free=1, process=99, reserved=90, allocated=85), "94% of what torch holds"),
        (sizes(tried=3, total=100, free=1, process=99, reserved=90, allocated=85), "and 3.00 GiB more"),
    ],
)
def test_the_figures_of_the_evidence(figures: MessageSizes, words: str):
    evidence = find_cause(figures)[1][0]
    assert f" {words}" in f" {evidence}"


SIZES_TOLD = [
    (sizes(tried=1, reserved=9, allocated=7), "tensors take 7.00 GiB, and 2.00 GiB are reserved and unused", True),
    (sizes(tried=1, allocated=7), "reserved and unused", False),
    (sizes(tried=1, reserved=7, allocated=9), "and 0 bytes are reserved and unused", True),
    (sizes(tried=1, total=8, free=0, reserved=8), "spills", False),
    (sizes(tried=1, total=8, free=0, reserved=8 + BYTE), "spills", True),
    (sizes(tried=1, total=8, free=0, allocated=8 + BYTE), "spills", True),
    (sizes(tried=1, reserved=7, process=7), "outside torch's allocator", False),
    (sizes(tried=1, reserved=7, process=7 + BYTE), "1 byte of this process", True),
    (sizes(tried=1, reserved=7, process=7 + 2 * 2**-10), "2.00 MiB of this process", True),
    (sizes(tried=1, reserved=7, process=8), "NCCL", True),
    (sizes(tried=1, allocated=7, process=8), "Metal", True),
    (sizes(tried=1, process=8), "outside torch's allocator", False),
    (sizes(tried=1, total=8, reserved=7, others={5: 7.5}), "512.00 MiB of this process", True),
    (sizes(tried=1, outside=1343 / 1024), "and other processes", False),
    (sizes(tried=1, outside=1343 / 1024 + BYTE), "and other processes", True),
    (sizes(tried=1, others={5: 2}), "process 5 has 2.00 GiB", True),
    (sizes(tried=1, others={0: 2}), "other processes have 2.00 GiB", True),
    (sizes(tried=1, private_pools=2), "2.00 GiB are in private pools", True),
]


def test_the_sizes_that_are_told():
    for figures, words, is_said in SIZES_TOLD:
        _, lines = find_cause(figures)
        assert any(words in line for line in lines) == is_said


@pytest.mark.parametrize(
    ("figures", "pids"),
    [
        # In a container the process is listed among the others: together they have more than the GPU and a hundredth.
        (sizes(total=100, reserved=50, others={7: 51}), [7]),
        (sizes(total=100, reserved=50, others={7: 51 + BYTE}), []),
        (sizes(total=100, reserved=85, others={6: 90, 7: 85, 8: 5}), [6, 8]),  # the smallest that holds torch's memory
        (sizes(total=100, reserved=85, others={7: 85 - BYTE, 8: 80}), [7, 8]),  # none holds it
        (sizes(total=100, reserved=85, process=90, others={7: 90}), [7]),
        (sizes(reserved=85, others={7: 90}), [7]),
        (sizes(total=100, others={7: 90}), [7]),
    ],
)
def test_the_processes_that_are_others(figures: MessageSizes, pids: list[int]):
    assert [pid for pid, _ in list_other_processes(figures)] == pids


@pytest.mark.parametrize(
    ("figures", "own", "others", "outside"),
    [
        (sizes(total=80, free=10, process=50, reserved=40), 50, 20, None),
        (sizes(total=80, free=10, reserved=40, allocated=30), 40 + CONTEXT, 30 - CONTEXT, 30),
        (sizes(total=80, free=10, allocated=30), 30 + CONTEXT, 40 - CONTEXT, None),
        (sizes(total=80, free=40, reserved=40), 40 + CONTEXT, 0, None),
        (sizes(total=80, free=10), None, None, None),
        (sizes(total=80, reserved=40), 40 + CONTEXT, None, None),
        (sizes(free=10, reserved=40), 40 + CONTEXT, None, None),
        (sizes(total=80, free=10, reserved=40, others={7: 12, 8: 13}), 40 + CONTEXT, 25, None),
        (sizes(total=80, free=1, reserved=40, others={7: 45, 8: 13}), 45, 13, None),
        (sizes(total=80, free=1, reserved=40, others={7: 79}), 79, 0, None),
    ],
)
def test_whose_memory_it_is(figures: MessageSizes, own: float | None, others: float | None, outside: float | None):
    def in_bytes(gib: float | None) -> int | None:
        return None if gib is None else int(gib * GIB)

    size = find_outside_size(figures)
    found = (find_own_bytes(figures), sum_other_processes(figures), None if size is None else size.num_bytes)
    assert found == (in_bytes(own), in_bytes(others), in_bytes(outside))
