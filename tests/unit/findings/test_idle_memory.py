"""What is kept after its last use, in hand-written traces: each effect on the peak is worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Severity, find_all
from memprof.findings.edits import Edit, EditKind
from memprof.findings.idle_memory import find
from memprof.trace.events import CycleKind, Event, EventKind, Owner, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.figures import all_figures
from tests.unit.findings.idle import OUT, UsesBuilder, exits, logits_bound


def test_names_the_variable_and_says_the_peak_without_it() -> None:
    (finding,) = logits_bound().find()
    assert (finding.id, finding.severity, finding.num_bytes) == ("idle-memory", Severity.WARNING, 100 * MIB)
    assert finding.title == "100.00 MiB stay on the GPU after their last use: variable `out` (x/train.py:9)"
    fix, effect, tensors, last_use = finding.evidence
    assert last_use.text == "last used in backward of step 1"
    assert (fix.text, fix.source) == ("fix: `del out` after the last use", "/x/train.py:9 main")
    assert "at most 300.00 MiB instead of 400.00 MiB" in effect.text
    # The segment of 100 MiB is kept for later, and too small for 300; that of 20 MiB is not needed any more.
    assert "reserves 400.00 MiB instead of 420.00 MiB" in effect.text and effect.num_bytes == 20 * MIB
    assert (tensors.source, tensors.num_bytes) == ("model.py:3 forward", 100 * MIB)


def test_what_fills_a_container_is_the_line_to_change() -> None:
    b = logits_bound()
    b.trace.idle_holders[:] = [b.trace.idle_holders[0]._replace(kind="dict", name="Cache.parts", fills=True)]
    (finding,) = b.find()
    assert "dict `Cache.parts` (x/train.py:9)" in finding.title
    assert finding.evidence[0].text == "fix: drop the tensors of `Cache.parts` after their use"


def windowed(num_kept: int, limit: int | None = None) -> UsesBuilder:
    """Each of four steps makes a tensor that is freed `num_kept` steps later; one was seen in a variable."""
    b = UsesBuilder(PhaseKind.MODEL)
    b.parameter("weight", 100)
    made: list[int] = []
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        made.append(b.alloc(100 * MIB, line="train.py:7 main"))
        b.use(made[-1])
        b.phase(PhaseKind.BACKWARD, step)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        if step >= num_kept:
            b.free(made[step - num_kept])
    b.trace.idle_holders.append(OUT._replace(storages=(made[0],), limit=limit))
    return b


def test_a_window_or_a_cache_keeps_what_it_has_on_purpose() -> None:
    assert windowed(1).find()
    assert not windowed(2).find()
    assert not windowed(1, limit=8).find()


def test_where_no_holder_was_seen_the_line_is_named() -> None:
    (finding,) = logits_bound(held=False).find()
    assert "the result of empty at model.py:3" in finding.title


@pytest.mark.parametrize(
    ("idle_mib", "other_mib", "is_told"), [(64, 300, True), (62, 300, False), (100, 1900, True), (100, 1902, False)]
)
def test_it_is_at_least_64_mib_and_a_twentieth_of_the_peak(idle_mib: int, other_mib: int, is_told: bool) -> None:
    assert bool(logits_bound(idle_mib, other_mib).find()) == is_told


def test_what_the_program_may_still_read_is_no_finding_until_it_has_ended() -> None:
    b = logits_bound(held=False)
    b.trace.idle_holders.append(OUT._replace(storages=(0,), is_read_later=True))
    assert not b.find()
    exits(b)
    assert b.find()


def test_what_an_evaluation_keeps_is_told_by_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logits_bound().find()
    monkeypatch.setattr("memprof.findings.idle_memory.find_kept_storages", lambda _: frozenset({0}))
    assert not logits_bound().find()


def test_says_whether_the_run_fits_without_it() -> None:
    (decides,) = logits_bound().find(300 * MIB)
    assert decides.is_decisive
    (too_large,) = logits_bound().find(298 * MIB)
    assert not too_large.is_decisive


def test_says_why_a_run_fits_that_reserves_more_than_there_is() -> None:
    """Without the logits a segment of 100 MiB is empty, and stays until the second step needs 300."""
    (finding,) = logits_bound().find(310 * MIB)
    effect = "reserves 400.00 MiB instead of 420.00 MiB, of which cached segments are released when the GPU is full"
    assert finding.is_decisive and finding.evidence[1].text.endswith(effect)
    (roomy,) = logits_bound().find(410 * MIB)
    assert roomy.evidence[1].text.endswith("reserves 400.00 MiB instead of 420.00 MiB")


def test_the_finding_without_which_the_run_fits_comes_first() -> None:
    b = logits_bound()
    b.use()
    ids = [finding.id for finding in find_all(b.context(300 * MIB))]
    assert ids[:2] == ["idle-memory", "does-not-fit"]


def test_silent_where_uses_are_not_known() -> None:
    b = logits_bound()
    b.use()
    b.trace.events.append(Event(EventKind.POOL, 1))
    assert not find(b.context())  # a CUDA graph may use it
    b = logits_bound()
    b.trace.last_uses.clear()
    assert not find(b.context())


def test_silent_on_the_loop_of_memprof_profile() -> None:
    b = logits_bound()
    b.trace.facts = dataclasses.replace(b.trace.facts, command="profile")
    assert not b.find()


def test_silent_on_what_is_used_again_or_dies_before_the_next_phase() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    saved, temporary = b.alloc(100 * MIB), b.alloc(100 * MIB)
    b.use(saved, temporary)
    b.free(temporary)
    b.phase(PhaseKind.BACKWARD)
    b.free(b.alloc(300 * MIB))
    b.use(saved)
    b.free(saved)
    assert not b.find()


def test_silent_on_what_was_never_used() -> None:
    """A batch that was loaded ahead, weights that are only initialized."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100 * MIB // 4)
    b.use(weight)
    b.alloc(100 * MIB)
    b.phase(PhaseKind.FORWARD)
    b.use(b.alloc(300 * MIB))
    exits(b)
    assert not b.find()


def test_what_piles_up_is_told_once_as_growth() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    b.parameter("weight", 100)
    for step in range(1, 7):
        b.phase(PhaseKind.FORWARD, step)
        b.use(b.alloc(100 * MIB, line="train.py:7 main"))
        b.phase(PhaseKind.BACKWARD, step)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)
    # So is what the step adds in which memory runs out.
    b.phase(PhaseKind.FORWARD, 7)
    newest = b.alloc(100 * MIB, line="train.py:7 main")
    b.use(newest)
    b.trace.idle_holders.append(OUT._replace(kind="list", storages=(newest,)))
    b.phase(PhaseKind.BACKWARD, 7)
    b.alloc(400 * MIB)
    assert not b.find(1000 * MIB)


@pytest.mark.parametrize(
    ("change", "fix", "edit"),
    [
        ({}, "`del out` after the last use", Edit(EditKind.DELETE, "/x/train.py:9 main", "out")),
        ({"name": "out[0]"}, "`del out` after the last use", Edit(EditKind.DELETE, "/x/train.py:9 main", "out")),
        ({"name": "self.out"}, "drop the tensors of `self.out` after their use", None),
        ({"kind": "list"}, "drop the tensors of `out` after their use", None),
        ({"source": None}, "`del out` after the last use", None),
        (
            {"kind": CycleKind.CTX, "name": "ctx.out -> Out"},
            "give it to ctx.save_for_backward(...), which keeps no cycle",
            Edit(EditKind.SAVE_FOR_BACKWARD, "/x/train.py:9 main", "out"),
        ),
    ],
)
def test_the_change_of_the_program_and_its_edit(change: dict[str, Any], fix: str, edit: Edit | None) -> None:
    b = logits_bound()
    b.trace.idle_holders[:] = [b.trace.idle_holders[0]._replace(**change)]
    (finding,) = b.find()
    assert (finding.evidence[0].text, finding.edit) == (f"fix: {fix}", edit)
    assert finding.evidence[0].source == change.get("source", "/x/train.py:9 main")
    assert ("train.py:9" in finding.title) == ("source" not in change)
    assert ("garbage collector" in finding.evidence[2].text) == (change.get("kind") is CycleKind.CTX)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("largest", ["torch.load", "aten.empty"])
def test_what_is_loaded_may_be_loaded_into_host_memory(held: bool, largest: str) -> None:
    """If the largest tensor that is kept is of torch.load."""
    b = UsesBuilder(PhaseKind.MODEL)
    loaded = b.alloc(100 * MIB, op=largest, line="train.py:5 main")
    small = b.alloc(4 * MIB, op="torch.load", line="train.py:5 main")
    b.use(loaded, small)
    b.phase(PhaseKind.FORWARD)
    b.free(b.alloc(300 * MIB))
    exits(b)
    if held:
        b.trace.idle_holders.append(OUT._replace(kind="dict", name="state", storages=(loaded, small)))
    (finding,) = b.find()
    is_load = largest == "torch.load"
    assert ('map_location="cpu"' in finding.evidence[0].text) == is_load
    assert finding.edit == (Edit(EditKind.LOAD_ON_HOST, "train.py:5 main") if is_load else None)


def test_the_largest_kinds_of_tensors_are_shown() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    made = [b.alloc(mib * MIB, op=f"aten.op{mib}") for mib in (20, 60, 40, 30, 30, 30)]
    b.use(*made)
    b.phase(PhaseKind.FORWARD, 2)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 2)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=tuple(made)))
    (finding,) = b.find()
    assert [all_figures(finding)[0][0], *all_figures(finding)[3:-1]] == [
        "210.00 MiB",
        ["3", "[31457280]", "uint8", "aten.op30", "train.py:1"],
        ["1", "[62914560]", "uint8", "aten.op60", "train.py:1"],
        ["1", "[41943040]", "uint8", "aten.op40", "train.py:1"],
    ]
    assert [line.num_bytes for line in finding.evidence[2:-1]] == [90 * MIB, 60 * MIB, 40 * MIB]


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        (PhaseKind.OTHER, None, "train.py:1"),
        (PhaseKind.FORWARD, None, "last used in code outside modules"),
        (PhaseKind.FORWARD, PhaseKind.EVALUATION, "last used in evaluation of step 3, micro-batch 2"),
    ],
)
def test_the_last_use_is_told_by_its_stage(first: PhaseKind, then: PhaseKind | None, text: str) -> None:
    """A phase that allocates nothing is no stage of the ledger, and what is outside of all is not named."""
    b = UsesBuilder(first)
    out = b.alloc(100 * MIB)
    if then is not None:
        b.phase(then, 3, 2)
    b.use(out)
    b.phase(PhaseKind.FORWARD, 4)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 4)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=(out,)))
    (finding,) = b.find()
    assert finding.evidence[-1].text.endswith(text)


@pytest.mark.parametrize("role", [Role.KV_CACHE, None])
def test_a_cache_of_keys_and_values_is_kept_by_its_variable(role: Role | None) -> None:
    b = logits_bound()
    if role is not None:
        b.trace.owners[0] = Owner(role, "")
    (finding,) = b.find()
    assert "variable `out`" in finding.title


@pytest.mark.parametrize(
    ("rows", "op", "is_told"),
    [(8, "aten.index", True), (9, "aten.index", False), (8, "aten.gather", True), (8, "aten.mm", False)],
)
def test_what_is_computed_for_more_than_is_used(rows: int, op: str, is_told: bool) -> None:
    """Of 64 rows some are gathered in the last use."""
    b = UsesBuilder(PhaseKind.FORWARD)
    rays = b.new(64, MIB // 2, line="rays.py:2 main")
    b.use(rays)
    b.new(rows, MIB // 2, op=op, line="rays.py:3 main")
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(300 * MIB)
    b.free(rays)
    b.trace.idle_holders.append(OUT._replace(storages=(rays,)))
    (finding,) = b.find()
    told = f"index first, and compute only the elements that rays.py:3 takes ([{rows} x {MIB // 2}])"
    assert (told in finding.evidence[0].text) == is_told
    assert (finding.edit is None) == is_told
    predicate = "are computed, and few of them used" if is_told else "stay on the GPU after their last use"
    assert finding.title == f"128.00 MiB {predicate}: variable `out` (x/train.py:9)"
    # What is made of the rows gets smaller too, so that the run needs less than without these alone.
    assert (finding.evidence[1].required_bytes is None) == is_told
