"""What a caught out-of-memory error keeps by its traceback: in an `except` block, or in a variable that has it."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.trace.events import Event, EventKind, Holder
from tests.unit.virtual.test_refusals import MIB, small_gpu, take

pytestmark = pytest.mark.usefixtures("small_heap")


def fail() -> None:
    part = take(300 * MIB)
    take(600 * MIB - part.numel() // 300)


def retry_in_the_block() -> None:
    other = take(200 * MIB)
    try:
        fail()
    except torch.OutOfMemoryError:
        try:
            fail()
        except torch.OutOfMemoryError:
            other.zero_()


def keep_the_error() -> torch.OutOfMemoryError | None:
    last = None
    for _ in range(2):
        try:
            take(200 * MIB)
            fail()
        except torch.OutOfMemoryError as error:
            last = error
    return last


def keep_all_errors() -> list[object]:
    errors = []
    for number in range(2):
        try:
            fail()
        except torch.OutOfMemoryError as error:
            errors.append((number, error))
    return errors


def keep_no_error() -> list[str]:
    texts = []
    for _ in range(2):
        try:
            fail()
        except torch.OutOfMemoryError as error:
            texts.append(str(error))
    return texts


def fail_with(model: nn.Module) -> None:
    layers = [model, nn.Linear(16, 16).cuda()]
    take(2000 * MIB)
    assert layers


def test_layers_of_the_attempt_are_kept_by_its_error_and_models_of_variables_are_not() -> None:
    with small_gpu() as gpu:
        with_variable = nn.Linear(32, 32).cuda()
        try:
            fail_with(with_variable)
        except torch.OutOfMemoryError:
            gpu._kept_memory.caught_errors.find_holders()
        (holder,) = gpu.trace.error_holders
    assert {gpu.trace.storages[index].shape for index in holder.storages} == {(16, 16), (16,)}


def holders_of(program: Callable[[], object], used: int = 400) -> list[Holder]:
    """Return the holders that are found where the GPU has `used` MiB less than 924, and `fail` needs 900."""
    with small_gpu() as gpu:
        hog = take(used * MIB)
        program()
        assert hog.numel()
    return gpu.trace.error_holders


@pytest.mark.parametrize(
    ("program", "kind", "name", "line"),
    [
        (retry_in_the_block, "except", "retry_in_the_block", "fail()"),
        (keep_the_error, "OutOfMemoryError", "last", "last = error"),
        (keep_all_errors, "list", "errors", "errors.append((number, error))"),
    ],
)
def test_names_the_block_or_the_variable(program, kind, name, line):
    holder, *others = holders_of(program, used=300)
    alike = {"event": 0, "storages": (), "is_read_later": False}  # at the end nothing is read later
    assert all(other._replace(**alike) == holder._replace(**alike) for other in others)
    assert (holder.kind, holder.name, len(holder.storages)) == (kind, name, 1)
    file, _, number = (holder.source or "").partition(" ")[0].rpartition(":")
    assert linecache.getline(file, int(number)).strip() == line


def test_an_error_that_is_gone_keeps_nothing():
    assert not holders_of(keep_no_error)


def test_only_what_the_attempt_had_is_kept_by_its_error():
    """A tensor from before, and one that the retry allocates, are not the error's."""
    with small_gpu() as gpu:
        before = take(100 * MIB)
        try:
            fail()
        except torch.OutOfMemoryError as error:
            last = error
        after = take(100 * MIB)
        gpu._kept_memory.caught_errors.find_holders()
        (holder,) = gpu.trace.error_holders
        (kept,) = holder.storages
        assert gpu.trace.storages[kept].num_bytes == 300 * MIB
        # Were it not for the error, it would be freed where that is raised: after the refused request and its free.
        assert gpu.trace.last_uses[kept] == gpu.trace.events.index(Event(EventKind.ALLOC, gpu.trace.refused[0])) + 2
        assert before.numel() == after.numel() and str(last)
        gpu._kept_memory.caught_errors.find_holders()
        assert len(gpu.trace.error_holders) == 1, "found once"


def test_the_error_is_not_kept_by_the_search():
    """memprof's own frames must not have the error: Python's garbage collector is off in runs."""
    with small_gpu() as gpu:
        try:
            fail()
        except torch.OutOfMemoryError:
            gpu._kept_memory.caught_errors.find_holders()
            assert gpu.recorder.storages.live_bytes == 300 * MIB
        assert gpu.recorder.storages.live_bytes == 0
