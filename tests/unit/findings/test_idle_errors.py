"""What caught errors keep, in hand-written traces; what an error that ends the run leaves is not idle."""

from __future__ import annotations

import pytest

from memprof.findings.edits import Edit, EditKind
from memprof.trace.events import Holder, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.idle import OUT, UsesBuilder


def test_what_is_gone_when_memory_runs_out_is_not_the_cause() -> None:
    """It has left a segment that 20 MiB pin."""
    b = UsesBuilder(PhaseKind.FORWARD)
    idle = b.alloc(100 * MIB)
    b.use(idle)
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(100 * MIB)
    b.free(idle)
    b.alloc(20 * MIB)
    b.alloc(120 * MIB)
    assert not b.find(250 * MIB)


def test_after_an_error_only_as_many_as_the_variable_had_are_idle() -> None:
    """Three layers' activations and `out` are made by one line; the backward would have read the activations."""
    b = UsesBuilder(PhaseKind.FORWARD)
    first = b.alloc(100 * MIB, line="model.py:3 forward")
    b.use(first)
    b.free(first)
    b.phase(PhaseKind.FORWARD, 2)
    made = [b.alloc(100 * MIB, line="model.py:3 forward") for _ in range(4)]
    b.use(*made)
    b.phase(PhaseKind.BACKWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders.append(OUT._replace(storages=(first,)))
    (finding,) = b.find(600 * MIB)
    assert finding.num_bytes == 100 * MIB and finding.is_decisive


@pytest.mark.parametrize("held", [True, False])
def test_after_an_error_keys_and_values_may_be_of_a_layer_that_the_call_had_not_come_to(held: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    keys = b.new(100 * MIB // 4, owner=(Role.KV_CACHE, ""))
    b.use(keys)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(keys,)))
    assert bool(b.find(350 * MIB)) == held


def test_after_an_error_what_the_step_before_used_in_its_backward_is_not_idle() -> None:
    """The backward that the error has cut would have read it."""
    b = UsesBuilder(PhaseKind.FORWARD)
    first = b.alloc(100 * MIB, line="model.py:3 forward")
    b.phase(PhaseKind.BACKWARD)
    b.use(first)
    b.phase(PhaseKind.FORWARD, 2)
    second = b.alloc(100 * MIB, line="model.py:3 forward")
    b.use(second)
    b.free(first)
    b.phase(PhaseKind.BACKWARD, 2)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders.append(OUT._replace(storages=(first,)))
    assert not b.find(300 * MIB)


def test_a_checkpoint_that_was_seen_at_the_error_is_no_more_than_what_was_seen() -> None:
    """The line has also loaded what the optimizer has now, and has not used yet."""
    b = UsesBuilder(PhaseKind.MODEL)
    weights, state = (b.alloc(100 * MIB, "torch.load", line="train.py:5 main") for _ in range(2))
    b.use(weights, state)
    b.phase(PhaseKind.FORWARD)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    holder = OUT._replace(event=len(b.trace.events), kind="dict", name="loaded['model']", storages=(weights,))
    b.trace.idle_holders.append(holder)
    (finding,) = b.find(400 * MIB)
    assert finding.num_bytes == 100 * MIB
    assert finding.evidence[0].text == 'fix: load it with map_location="cpu"'


@pytest.mark.parametrize(
    ("holder", "by", "fix"),
    [
        (Holder(0, "except", "main", "/x/train.py:20 main", False, None, (), 0, 0, None),
         "the `except` block in which `main` retries (x/train.py:20)", "leave the `except` block before the retry"),
        (Holder(0, "list", "errors", "/x/train.py:20 main", True, None, (), 0, 0, None),
         "the traceback of list `errors` (x/train.py:20)", "keep no exception in `errors`"),
    ],
)  # fmt: skip
def test_what_caught_errors_keep_is_one_finding_a_holder(holder: Holder, by: str, fix: str) -> None:
    """Two attempts of 100 MiB that failed lie beside a third of 300; 400 MiB are usable."""
    b = UsesBuilder(PhaseKind.FORWARD)
    for _ in range(2):
        kept = b.alloc(100 * MIB)
        b.use(kept)
        b.trace.error_holders.append(holder._replace(storages=(kept,)))
    third = b.alloc(300 * MIB)
    b.use(third)
    (finding,) = b.find(400 * MIB)
    assert finding.is_decisive and finding.num_bytes == 200 * MIB
    assert f"tensors of an attempt that ran out of memory, kept by {by}" in finding.title
    assert fix in finding.evidence[0].text and finding.evidence[0].source == holder.source


@pytest.mark.parametrize(
    ("name", "source", "by"),
    [
        ("main", "/x/train.py:20 main", "`main` retries (x/train.py:20)"),
        ("<module>", "/x/train.py:20 <module>", "the script retries (x/train.py:20)"),
        ("", None, "a library retries"),
    ],
)
def test_an_except_block_is_named_by_its_function(name: str, source: str | None, by: str) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    kept = b.alloc(100 * MIB)
    b.use(kept)
    b.trace.error_holders.append(Holder(0, "except", name, source, False, None, (kept,), 0, 0, None))
    b.use(b.alloc(350 * MIB))
    (finding,) = b.find(400 * MIB)
    assert by in finding.title
    assert finding.edit == (None if source is None else Edit(EditKind.RETRY_AFTER_HANDLER, source, name))


def test_an_error_in_a_variable_is_to_be_kept_as_its_text() -> None:
    """Two variables are two findings."""
    b = UsesBuilder(PhaseKind.FORWARD)
    for number in (1, 2):
        kept = b.alloc(100 * MIB)
        b.use(kept)
        line = f"/x/train.py:{number} main"
        b.trace.error_holders.append(Holder(0, "", f"error{number}", line, True, None, (kept,), 0, 0, None))
    b.use(b.alloc(350 * MIB))
    edits = [finding.edit for finding in b.find(460 * MIB)]
    assert edits == [Edit(EditKind.KEEP_ERROR_TEXT, f"/x/train.py:{n} main", f"error{n}") for n in (1, 2)]
