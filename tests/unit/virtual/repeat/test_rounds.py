"""Loops of which some rounds are written, against the same loops run: every field of the trace is the same."""

import dataclasses
import functools

import pytest
import torch

from memprof.catalog import find_gpu
from memprof.remedies.head_loss import LogitsStep, Rows, row_losses
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.repeat import RunAgain
from memprof.watch.rounds import rounds

ROWS, CHUNK = 100, 10
WRITTEN = (ROWS // CHUNK - 5) + (ROWS // CHUNK - 4)
"""Of a loss, forward and backward: in the forward what the first round leaves is more than what the others do."""
KEPT = []


def parts(rows=ROWS, size=CHUNK):
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def recorded(loop, *, repeats):
    """The trace of a run, and how many rounds were written in it."""
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=repeats)
    KEPT.clear()
    with device:
        with device.phase(PhaseKind.FORWARD, 1):
            loop()
        if repeats:
            device.repeats.settle()
    KEPT.clear()
    return device.trace, device.repeats.times if repeats else 0


def check_same(loop):
    run, _ = recorded(loop, repeats=False)
    trace, times = recorded(loop, repeats=True)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    return times


def head(rows=ROWS, bias=False, dtype=torch.bfloat16, size=CHUNK, **asked):
    hidden, weight = (torch.empty(number, 16, dtype=dtype, device="cuda", requires_grad=True) for number in (rows, 50))
    shift = torch.empty(50, dtype=dtype, device="cuda", requires_grad=True) if bias else None
    target = torch.empty(rows, dtype=torch.int64, device="cuda")
    losses = row_losses(hidden, weight, shift, target, rows=Rows(size, 0), **asked)
    losses.backward(torch.empty_like(losses))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"bias": True, "label_smoothing": 0.1},
        {"dtype": torch.float32},
        {"steps": (LogitsStep("cast", torch.float32), LogitsStep("tanh"), LogitsStep("mul", 30.0))},
    ],
    ids=["plain", "bias and smoothing", "float32", "logits that are capped"],
)
def test_most_chunks_of_a_loss_are_written(asked):
    """All but the first ones, of which two do the same, and the last."""
    assert check_same(functools.partial(head, **asked)) == WRITTEN


def test_a_shorter_last_chunk_is_run():
    assert check_same(functools.partial(head, rows=ROWS + 3)) == WRITTEN


def test_chunks_whose_labels_are_known_are_run():
    def loop():
        hidden, weight = (torch.empty(number, 16, device="cuda", requires_grad=True) for number in (ROWS, 50))
        row_losses(hidden, weight, None, torch.arange(ROWS).cuda() % 50, rows=Rows(CHUNK, 0)).mean().backward()

    check_same(loop)


@pytest.mark.parametrize("size", [ROWS, ROWS // 2, 30])
def test_few_chunks_are_run(size):
    assert check_same(functools.partial(head, size=size)) == 0


def made(part):
    return torch.empty(part.stop - part.start, device="cuda")


@torch.no_grad()
def test_what_a_round_leaves_dies_in_the_next():
    def loop():
        for part in rounds(parts()):
            first = made(part)
            second = first + 1
            del first
        KEPT.append(second * 2)

    assert check_same(loop) == len(parts()) - 4


@torch.no_grad()
def test_rounds_of_which_more_is_kept_than_the_next_lets_go_of_are_run():
    def loop():
        for part in rounds(parts()):
            KEPT.extend([made(part)])
        KEPT.clear()

    assert check_same(loop) == 0


@torch.no_grad()
def test_rounds_that_grow_are_run():
    def loop():
        for at, part in enumerate(rounds(parts())):
            made(slice(0, part.stop + at))

    assert check_same(loop) == 0


@torch.no_grad()
def test_a_last_round_that_is_another_is_run_again():
    def loop():
        for part in rounds(parts()):
            made(part if part.stop < ROWS else slice(0, 7000))

    with pytest.raises(RunAgain, match="last round"):
        recorded(loop, repeats=True)


def test_a_loop_that_autograd_follows_is_run():
    def loop():
        weight, total = torch.empty(ROWS, device="cuda", requires_grad=True), 0
        for part in rounds(parts()):
            total = total + weight[part].sum()
        total.backward()

    assert check_same(loop) == 0


def test_without_a_virtual_card_every_part_is_looped_over():
    assert list(rounds(parts())) == parts()
