"""Advice that cannot reach the figure is not given."""

from __future__ import annotations

import io

import pytest

from memprof.doctor import Diagnosis, diagnose
from memprof.doctor.diagnosis import MessageSizes
from memprof.doctor.message_sizes import format_size
from memprof.doctor.room import Room

GIB = 1 << 30


FREED = [
    (45, 44, 1, 80, "cpu-offload-weights", True),
    (46, 44, 1, 80, "cpu-offload-weights", False),  # everything freed is 45
    (10, 5, 10, 80, "8-bit-optimizer", True),  # at most half of what is allocated
    (10, 4.9, 10, 80, "8-bit-optimizer", False),
    (10, 2.5, 10, 80, "lora", True),
    (10, 2.4, 10, 80, "lora", False),
    (20, 5, 10, 80, "bfloat16", True),  # the request is half as large, too
    (20, 4.9, 10, 80, "bfloat16", False),
    (10, 4, 9, 80, "cpu-offload-optimizer", True),
    (10, 3.9, 9, 80, "cpu-offload-optimizer", False),
    (32, 1, 32, 80, "qlora", True),
    (32, 0.9, 32, 80, "qlora", False),
    (32, 1, 32, 80, "4-bit-weights", True),
    (32, 0.9, 32, 80, "4-bit-weights", False),
    (80, 0, 80, 80, "micro-batch", True),
    (81, 80, 80, 80, "micro-batch", False),
    (160, 80, 80, 80, "bfloat16", True),  # half of the request is as large as the GPU
    (161, 80, 80, 80, "bfloat16", False),
    (81, None, None, 80, "micro-batch", False),
    (45, None, None, None, "8-bit-optimizer", True),  # unknown
    (None, 1, 1, 80, "8-bit-optimizer", True),
    (45, 1, None, 80, "8-bit-optimizer", True),
]


def test_what_a_fix_can_free():
    for need, available, allocated, total, fix, is_reached in FREED:
        sizes = (None if value is None else int(value * GIB) for value in (need, available, allocated, total))
        assert Room(*sizes).is_reached_by(fix) == is_reached


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "available"),
    [
        (3, 50, 40, 13),  # what torch has reserved and does not use, too
        (3, 40, 50, 3),
        (3, None, 50, 3),
        (3, 50, None, 3),
        (0, None, None, 0),
        (None, 50, 40, None),
    ],
)
def test_what_a_message_says_is_available(
    free: int | None, reserved: int | None, allocated: int | None, available: int | None
):
    given = {"tried": 60, "total": 80, "free": free, "reserved": reserved, "allocated": allocated}
    sizes = MessageSizes(**{name: None if value is None else format_size(value) for name, value in given.items()})
    assert Room.from_sizes(sizes) == Room(60, available, allocated, 80)


@pytest.mark.parametrize(("need", "is_reached"), [(50, True), (51, False)])
def test_a_request_beside_nothing_else(need: int, is_reached: bool):
    assert Room(need, available=10, allocated=40, total=80).is_reached_by_freeing == is_reached


def full(tried: str, allocated: str, free: str = "1.00 GiB", total: str = "80.00 GiB", frames: str = "") -> Diagnosis:
    text = (
        f"{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"{total} of which {free} is free. Of the allocated memory {allocated} is allocated by PyTorch, and 20.00 MiB "
        "is reserved by PyTorch but unallocated."
    )
    return diagnose(io.BytesIO(text.encode()), "log")[0]


def test_a_request_that_freeing_cannot_serve_has_no_fix_of_other_tensors():
    found = full("45.08 GiB", "202.28 MiB", free="44.00 GiB", total="45.50 GiB")
    assert not {step.fix for step in found.steps} & {"8-bit-optimizer", "lora", "micro-batch", "bfloat16"}
    assert "202.28 MiB" in found.steps[0].what and "45.08 GiB" in found.steps[0].what


def test_a_request_larger_than_the_gpu_is_not_served_by_ending_others():
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 GiB. GPU 0 has a total capacity of 23.65 "
        "GiB of which 7.95 GiB is free. Process 1957120 has 7.10 GiB memory in use. Including non-PyTorch memory, this "
        "process has 8.58 GiB memory in use. Of the allocated memory 8.13 GiB is allocated by PyTorch, and 8.94 MiB is "
        "reserved by PyTorch but unallocated."
    )
    (found,) = diagnose(io.BytesIO(text.encode()), "log")
    assert found.cause == "large-tensor"
    assert not any("kill" in step.command or "nvidia-smi" in step.command for step in found.steps)
    assert "larger than the GPU" in found.steps[0].what


@pytest.mark.parametrize(("allocated", "is_offered"), [("78.00 GiB", True), ("1.90 GiB", False)])
def test_a_full_gpu_has_fixes(allocated: str, is_offered: bool):
    found = full("4.00 GiB", allocated, total="6.00 GiB" if not is_offered else "80.00 GiB")
    assert any(step.fix == "activation-checkpointing" for step in found.steps) == is_offered


# -- memory outside torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "reserved", "outside", "words"),
    [
        ("10.92 GiB", "30.88 MiB", "10.21 GiB", "696.16 MiB", "context and libraries"),
        ("10.76 GiB", "8.81 MiB", "1010.00 MiB", "9.77 GiB", "and other processes"),
        ("2.00 GiB", "1.00 GiB", "1.00 GiB", None, ""),
        ("8.00 GiB", "0 bytes", "19.15 GiB", None, ""),  # spilled into host memory
    ],
)
def test_old_messages_show_what_is_outside_torch(total: str, free: str, reserved: str, outside: str | None, words: str):
    text = (
        f"RuntimeError: CUDA out of memory. Tried to allocate 158.00 MiB (GPU 0; {total} total capacity; 500.00 MiB "
        f"already allocated; {free} free; {reserved} reserved in total by PyTorch)"
    )
    (found,) = diagnose(io.BytesIO(text.encode()), "log")
    assert (found.figures.outside and found.figures.outside.text) == outside
    assert any(words in line and outside in line for line in found.explanation) if outside else True
    assert any("neither free nor reserved" in line for line in found.explanation) == bool(outside)


def test_messages_with_the_process_s_memory_say_it_themselves():
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the "
        "allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    (found,) = diagnose(io.BytesIO(text.encode()), "log")
    assert found.figures.outside is None
    assert any("8.00 GiB of this process are outside torch's allocator" in line for line in found.explanation)
