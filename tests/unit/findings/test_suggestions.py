"""A suggestion is not in force, goes with what is, suits the run's mode, and saves enough of what the run needs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memprof.findings.proposals
from memprof.allocator import GpuMemory, parse_config, replay_in_host_memory, replay_on_gpu
from memprof.findings import Context, Suggestion, rules, suggestions
from memprof.findings.finding import RULES as RULES_OF_FINDINGS
from memprof.findings.finding import SEARCH_RULES
from memprof.findings.first_step import compute_first_step_bytes
from memprof.findings.suggestions import (
    PROPOSAL_RULES,
    Proposal,
    is_cured,
    list_fix_names,
    proposes,
    suggest,
    suggest_against,
)
from memprof.fixes.catalog import FIXES, script_fix_names
from memprof.ledger.ledger import build_ledger
from memprof.ledger.what_if import edit_events, resize
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import NONE, Event, EventKind, FirstStep, ModuleRole, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.language_models import head_and_loss, of, training
from tests.unit.traces import TraceBuilder

LOGITS = ("chunked-loss", "micro-batch")


def large_logits() -> TraceBuilder:
    b = training(8192, 50000)
    head_and_loss(b, 8192, 50000)
    return b


def recommended(identifier: str, b: TraceBuilder | None = None, **known: object) -> tuple[str, ...]:
    (finding,) = of((b or large_logits()).context(4000 * MIB, vocab_size=50000, **known), identifier)
    assert list_fix_names(finding.suggestions) == finding.fixes
    return finding.fixes


SPEC = TargetSpec(model="x", batch_size=2)


@pytest.mark.parametrize(
    ("known", "left_out"),
    [
        ({"spec": SPEC}, ()),
        ({}, LOGITS),  # a loss of the program's own; no input of a model says how many samples there are
        ({"spec": TargetSpec(model="x")}, ("micro-batch",)),  # there is one sequence
        ({"spec": SPEC.edit(fixes=("chunked-loss=64",))}, ("chunked-loss",)),
        ({"spec": SPEC, "fixes": ("chunked-loss",)}, ("chunked-loss",)),  # of `memprof run --fix`
        ({"spec": SPEC, "fixes": ("chunked-loss=64", "expandable-segments")}, ("chunked-loss",)),
        ({"spec": SPEC, "fixes": ("of-another-release",)}, ()),
        ({"spec": SPEC, "fixes": ("optimizer-in-backward",)}, ("micro-batch",)),  # they do not go together
        ({"spec": SPEC.edit(mode=Mode.INFERENCE)}, ("chunked-loss",)),
    ],
)
def test_logits(known: dict[str, object], left_out: tuple[str, ...]) -> None:
    wanted = tuple(name for name in LOGITS if name not in left_out)
    assert recommended("logits-explosion", **known) == wanted
    if "chunked-loss" not in wanted:  # else the logits are the cause, and their suggestions are enough
        assert recommended("does-not-fit", **known)[: len(wanted)] == wanted


def test_checkpointing_that_is_on() -> None:
    def asked(**changes: object) -> tuple[str, ...]:
        b = training(4096, 1000, layers=0)
        for layer in range(4):
            b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
            b.new(2, 4096, 512)
            b.new(2, 4096, 64)
            b.leave()
        b.phase(PhaseKind.BACKWARD)
        (finding,) = of(b.context(50 * MIB, spec=SPEC.edit(**changes)), "does-not-fit")
        return finding.fixes

    assert asked() == ("activation-checkpointing", "micro-batch")
    assert asked(activation_checkpointing=True) == ("micro-batch",)
    assert asked(fixes=("activation-checkpointing",)) == ("micro-batch",)
    assert asked(fixes=("cpu-offload-weights",)) == ("micro-batch",)  # it runs layers again itself


LOSS, SCORES, STEP = "logits-explosion", "attention-scores", "optimizer-step-temporaries"
RULES = [  # the cheapest first
    ("segments", "propose", "expandable-segments", ()),
    ("attention", "propose", "sdpa-attention", (SCORES,)),
    ("data_parallel", "propose", None, ()),
    ("chunked_loss", "propose", "chunked-loss", (LOSS,)),
    ("copies", "propose", None, ()),
    ("optimizer", "propose_fused", "fused-optimizer", (STEP,)),
    ("history", "propose", None, ()),
    ("vmap", "propose", None, ()),
    ("gradients", "propose", None, ()),
    ("sparse", "propose", None, ()),
    ("messages", "propose", None, ()),
    ("sparse", "propose_rows", None, ()),
    ("pairs", "propose", None, ()),
    ("micro_batch", "propose_accumulation", "micro-batch", (LOSS, SCORES)),
    ("checkpointing", "propose", "activation-checkpointing", ()),
    ("autocast", "propose_bfloat16", "amp-bfloat16", ()),
    ("autocast", "propose_float16", "amp-float16", ()),
    ("optimizer", "propose_8_bit", "8-bit-optimizer", ("float32-optimizer-state", STEP)),
    ("optimizer", "propose_on_host", "cpu-offload-optimizer", ()),
    ("host_memory", "propose", None, ()),
    ("micro_batch", "propose", "micro-batch", (LOSS, SCORES)),
    ("weights", "propose_bfloat16", "bfloat16", ()),
    ("weights", "propose_lora", "lora", ()),
    ("weights", "propose_on_host", "cpu-offload-weights", ()),
]


def test_rules_of_proposals_make_their_fix_for_their_findings() -> None:
    rules.import_rules()
    made = {
        (rule.propose.__module__.rpartition(".")[2], rule.propose.__name__): (
            order,
            rule.fix,
            (*rule.findings, *rule.cures),
        )
        for order, rule in PROPOSAL_RULES.items()
    }
    known = [made[module, name] for module, name, _, _ in RULES]
    assert [(fix, findings) for _, fix, findings in known] == [(fix, findings) for _, _, fix, findings in RULES]
    assert known == sorted(known)


def test_mismatches_and_matrices_of_tokens_guide_a_search() -> None:
    guiding = {RULES_OF_FINDINGS[order].__module__.rpartition(".")[2] for order in SEARCH_RULES}
    assert {"device_mismatch", "weight_delta"} <= guiding


# -- proposals, by hand ----------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """Without memprof's own rules."""
    rules.import_rules()
    own = dict(PROPOSAL_RULES)
    PROPOSAL_RULES.clear()
    yield
    PROPOSAL_RULES.clear()
    PROPOSAL_RULES.update(own)


def shrink(order: int, index: int, num_bytes: int, **options: object) -> None:
    """A rule that proposes another size of a storage."""

    @proposes(order, **options)
    def propose(context: Context) -> Iterator[Proposal]:
        change = f"number {order}" if "fix" not in options else ""
        yield Proposal(resize(context.ledger.trace, {index: num_bytes}), change)


def two_tensors(first_mib: int = 600, second_mib: int = 400) -> TraceBuilder:
    b = TraceBuilder()
    for mib in (first_mib, second_mib):
        b.alloc(mib * MIB)
    return b


def texts(found: tuple[Suggestion, ...]) -> list[str]:
    return [one.text.partition(":")[0] for one in found]


def test_what_fits_is_first_then_what_saves_most(alone: None) -> None:
    for order, mib in ((1, 500), (2, 100), (3, 200), (4, 0)):
        shrink(order, 0, mib * MIB)
    found = suggest(two_tensors().context(700 * MIB))
    assert texts(found) == ["number 2", "number 3", "number 4"]  # three at most: the first saves least
    assert [one.fits for one in found] == [True] * 3
    assert [one.required_bytes for one in found] == [500 * MIB, 600 * MIB, 400 * MIB]
    assert [one.num_bytes for one in found] == [500 * MIB, 400 * MIB, 600 * MIB]
    found = suggest(two_tensors().context(550 * MIB))
    assert texts(found) == ["number 2", "number 4", "number 3"] and not found[2].fits


@pytest.mark.parametrize(("mib", "is_told"), [(552, False), (550, True)])
def test_it_saves_a_twentieth_of_the_need(alone: None, mib: int, is_told: bool) -> None:
    shrink(1, 0, mib * MIB)
    assert bool(suggest(two_tensors().context(560 * MIB))) == bool(suggest(two_tensors().context())) == is_told


def test_less_is_enough_if_the_run_fits_then(alone: None) -> None:
    shrink(1, 0, 598 * MIB)
    (found,) = suggest(two_tensors().context(999 * MIB))
    assert found.fits and found.text == "number 1: needs 998.00 MiB instead of 1,000.00 MiB, and fits"
    assert not suggest(two_tensors().context(1001 * MIB))


@pytest.mark.parametrize(("mib", "is_told"), [(550, True), (552, False)])
def test_of_a_run_that_memory_ended_what_gets_past_that_point_saves_a_twentieth(
    alone: None, mib: int, is_told: bool
) -> None:
    """50 MiB of 1000 MiB, and 48 MiB, with which the next allocations fail."""
    shrink(1, 0, mib * MIB)
    b = two_tensors()
    b.trace.ended_out_of_memory = True
    found = suggest(b.context(999 * MIB))
    assert bool(found) == is_told and all(one.fits for one in found)


def test_what_frees_nothing_is_not_suggested(alone: None) -> None:
    shrink(1, 0, 600 * MIB)
    assert not suggest(two_tensors().context(999 * MIB)) and not suggest(two_tensors().context())


def test_nothing_that_frees_others_helps_a_tensor_larger_than_the_gpu(alone: None) -> None:
    shrink(1, 1, 0)
    shrink(2, 0, 300 * MIB)
    assert texts(suggest(two_tensors().context(500 * MIB))) == ["number 2"]  # the first does not fit
    assert texts(suggest(two_tensors(400, 600).context(500 * MIB))) == ["number 1"]


def test_of_a_run_that_ended_there_nothing_more_is_known(alone: None) -> None:
    shrink(1, 0, 0)
    shrink(2, 0, 500 * MIB)
    b = two_tensors()
    b.trace.ended_out_of_memory = True
    assert suggest(b.context(700 * MIB))[0].text == "number 1: this allocation fits"  # what is computed needs more
    b.phase(PhaseKind.FORWARD)
    first, second = suggest(b.context(700 * MIB))
    assert first.text.endswith("needs at least 400.00 MiB instead of 1,000.00 MiB")
    assert second.text.endswith("needs at least 900.00 MiB instead of 1,000.00 MiB; still does not fit")


def test_what_needs_more_than_the_run_did_where_it_ended_is_told_alone(alone: None) -> None:
    """Without a limit the run reserves 200 MiB, for 40 MiB are no room for 100 MiB; as it ended, 160 MiB."""
    shrink(1, 1, 46 * MIB)
    b = TraceBuilder()
    first, _ = b.alloc(40 * MIB), b.alloc(60 * MIB)
    b.free(first)
    b.alloc(100 * MIB)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.trace.ended_out_of_memory = True
    (found,) = suggest(b.context(150 * MIB))
    assert (found.required_bytes, found.num_bytes) == (186 * MIB, 14 * MIB)
    assert found.text == "number 1: this allocation fits, with allocator retries"


@pytest.mark.parametrize(("second_mib", "is_told"), [(18, True), (20, False), (22, False)])
def test_what_still_fails_takes_less_than_the_run(alone: None, second_mib: int, is_told: bool) -> None:
    """Without a limit the run reserves 200 MiB, and with its cache released 160 MiB, of which there are 100."""
    shrink(1, 1, second_mib * MIB)
    b = TraceBuilder()
    first, _ = b.alloc(40 * MIB), b.alloc(60 * MIB)
    b.free(first)
    b.alloc(100 * MIB)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.trace.ended_out_of_memory = True
    found = suggest(b.context(100 * MIB))
    assert bool(found) == is_told and all(one.fits is False for one in found)


@pytest.mark.parametrize(("usable_mib", "fits"), [(400, True), (399, False)])
def test_the_first_step_of_an_optimizer_has_to_fit_too(alone: None, usable_mib: int, fits: bool) -> None:
    """Parameters of 100 MiB, their gradients, and two tensors of state that they still get."""
    shrink(1, 1, 0)
    b = TraceBuilder()
    parameter = b.parameter("weight", 25, 1 << 20)
    b.phase(PhaseKind.FORWARD)
    b.alloc(500 * MIB)
    b.trace.ended_out_of_memory = True
    b.trace.first_steps = [FirstStep((parameter,), (NONE,), (2,))]
    (found,) = suggest(b.context(usable_mib * MIB))
    rest = "" if fits else ", and 400.00 MiB in the first optimizer step, which does not fit"
    assert found.text.endswith(f" MiB{rest}") and found.fits is fits


def test_state_that_still_comes_shrinks_as_what_there_is_of_it(alone: None) -> None:
    """Parameters and gradients of 100 MiB each, half of whose state is there, and 25 MiB with the change."""
    b = TraceBuilder()
    parameter = b.parameter("weight", 25, 1 << 20)
    gradient = b.new(25, 1 << 20, owner=(Role.GRADIENT, "weight"))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    state = b.new(25, 1 << 20, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(25, 1 << 20, op="aten.zeros_like")
    b.trace.ended_out_of_memory = True
    b.trace.first_steps = [FirstStep((parameter,), (gradient,), (1,))]
    context = b.context(350 * MIB)
    assert compute_first_step_bytes(context, b.trace) == 400 * MIB
    assert compute_first_step_bytes(context, resize(b.trace, {state: 25 * MIB})) == 250 * MIB


def test_where_none_makes_the_run_fit_their_combination_is_first(alone: None) -> None:
    shrink(1, 0, 300 * MIB)
    shrink(2, 1, 200 * MIB)
    shrink(3, 1, 100 * MIB)
    together, *others = suggest(two_tensors(400, 400).context(450 * MIB))
    assert texts(tuple(others)) == ["number 3", "number 2", "number 1"]
    # Number 2 saves nothing beside number 3, which makes the same tensor smaller.
    assert together.text == "number 3 and number 1 together: needs 400.00 MiB instead of 800.00 MiB, and fits"
    assert (together.fits, together.num_bytes, together.fix) == (True, 400 * MIB, None)


def test_a_combination_is_told_where_it_does_not_fit_either(alone: None) -> None:
    for order in (1, 2):
        shrink(order, order - 1, 200 * MIB)
    together = suggest(two_tensors(300, 300).context(350 * MIB))[0]
    assert together.text.startswith("number 1 and number 2 together: needs 400.00 MiB") and together.fits is False


def test_no_more_changes_are_combined_than_it_takes(alone: None) -> None:
    b = TraceBuilder()
    for order in (1, 2, 3):
        b.alloc(300 * MIB)
        shrink(order, order - 1, 200 * MIB)
    together = suggest(b.context(700 * MIB))[0]
    assert texts((together,)) == ["number 1 and number 2 together"] and together.required_bytes == 700 * MIB


def test_a_change_with_more_tensors_than_the_run_is_combined_too(alone: None) -> None:
    @proposes(1)
    def propose(context: Context) -> Iterator[Proposal]:
        trace = resize(context.ledger.trace, {0: 100 * MIB})
        copy = Event(EventKind.ALLOC, len(trace.storages))
        trace = dataclasses.replace(trace, storages=[*trace.storages, trace.storages[0]])
        yield Proposal(edit_events(trace, {len(trace.events) - 1: [copy]}, ()), "a copy")

    shrink(2, 1, 100 * MIB)
    together, *_ = suggest(two_tensors(300, 300).context(350 * MIB))
    assert together.text == "number 2 and a copy together: needs 300.00 MiB instead of 600.00 MiB, and fits"


def test_fixes_that_conflict_are_not_combined(alone: None) -> None:
    shrink(1, 0, 300 * MIB, fix="4-bit-weights")
    shrink(2, 1, 100 * MIB, fix="8-bit-weights")
    context = two_tensors(400, 400).context(450 * MIB, spec=SPEC)
    assert texts(suggest(context)) == ["8-bit-weights", "4-bit-weights"]


def test_the_context_is_in_what_a_run_needs(alone: None) -> None:
    shrink(1, 0, 300 * MIB)
    b = two_tensors(400, 200)
    gpu = GpuMemory(total_bytes=800 * MIB, context_bytes=250 * MIB)
    (found,) = suggest(Context(build_ledger(b.trace, replay_on_gpu(b.trace, gpu)), gpu.usable_bytes))
    assert found.text == "number 1: needs 750.00 MiB instead of 850.00 MiB, and fits"
    assert found.required_bytes == 500 * MIB


def test_a_finding_shows_its_own(alone: None) -> None:
    shrink(1, 0, 0, fix="fused-optimizer", findings=("toy",))
    shrink(2, 0, 0)
    (found,) = suggest_against(two_tensors().context(), "toy")
    assert (found.fix, found.fits) == ("fused-optimizer", None)
    b = two_tensors()
    b.trace.updates_parameters_manually = True  # there is no optimizer to replace
    assert not suggest_against(b.context(), "toy")


def offer(order: int, index: int, num_bytes: int, **fields: object) -> None:
    """A rule for the fix `micro-batch`, whose proposal has the `fields` too."""

    @proposes(order, fix="micro-batch")
    def propose(context: Context) -> Iterator[Proposal]:
        yield Proposal(resize(context.ledger.trace, {index: num_bytes}), **fields)


def test_a_suggestion_has_its_fix_with_its_value_or_a_change_of_the_program(alone: None) -> None:
    offer(1, 0, 0, value=4)
    offer(2, 0, 0, change="rows at a time")
    offer(3, 0, 0, change="smaller batches", value=2)
    found = suggest(two_tensors().context(450 * MIB, spec=SPEC))
    assert [one.fix for one in found] == ["micro-batch=4", None, "micro-batch=2"]
    assert texts(found) == ["micro-batch=4", "rows at a time", "smaller batches"]
    assert list_fix_names(found) == ("micro-batch", "micro-batch")


def test_of_changes_of_one_line_with_one_effect_the_first_is_told(alone: None) -> None:
    lines = "a.py:1 f", "a.py:1 f", "a.py:2 f", "a.py:1 f", None, None
    for order, (line, mib) in enumerate(zip(lines, (0, 0, 0, 100, 0, 0), strict=True)):
        offer(order, 0, mib * MIB, change=f"change {order}", source=line)
    assert texts(suggest(two_tensors().context(650 * MIB, spec=SPEC))) == ["change 0", "change 2", "change 3"]
    for order in (0, 2, 3):
        del PROPOSAL_RULES[order]
    assert texts(suggest(two_tensors().context(650 * MIB, spec=SPEC))) == ["change 1", "change 4", "change 5"]


@pytest.mark.parametrize("name", ["compile", "micro-batch", "bfloat16", "8-bit-optimizer", "cpu-offload-optimizer"])
def test_of_a_script_a_fix_that_no_option_makes_is_told_as_code(alone: None, name: str) -> None:
    shrink(1, 0, 0, fix=name)
    profiled, script = (texts(suggest(two_tensors().context(450 * MIB, spec=spec))) for spec in (SPEC, None))
    assert profiled == [name]
    assert script == [name if name in script_fix_names() else FIXES[name].describe_in_code()]


def test_code_for_a_fix_has_its_value(alone: None) -> None:
    offer(1, 0, 0, value=4)
    (found,) = suggest(two_tensors().context(450 * MIB))
    assert "micro-batches of 4" in found.text and found.fix == "micro-batch=4"


def test_what_saves_enough_and_does_not_fit_says_so(alone: None) -> None:
    shrink(1, 0, 400 * MIB)
    (found,) = suggest(two_tensors().context(700 * MIB))
    assert found.text == "number 1: needs 800.00 MiB instead of 1,000.00 MiB; still does not fit"
    (found,) = suggest(two_tensors().context(2000 * MIB))
    assert found.text == "number 1: needs 800.00 MiB instead of 1,000.00 MiB" and found.fits
    (found,) = suggest(two_tensors().context())
    assert found.fits is None


def test_a_run_that_reserves_more_than_there_is_says_why_it_fits(alone: None) -> None:
    shrink(1, 1, 400 * MIB)
    b = TraceBuilder()
    b.free(b.alloc(300 * MIB))
    b.alloc(600 * MIB)
    (found,) = suggest(b.context(500 * MIB))
    assert found.text == "number 1: fits, with allocator retries"


def test_the_estimate_takes_the_share_of_segments_that_the_run_has(alone: None) -> None:
    """400 MiB of segments are free at the peak of 600: what takes 60 MiB less is taken to need 100 less."""
    b = TraceBuilder()
    b.free(b.alloc(400 * MIB))
    b.alloc(600 * MIB)
    context = b.context(900 * MIB)
    shrink(1, 1, 540 * MIB)
    (candidate,) = suggestions._list_candidates(context)
    assert (candidate.required_bytes, candidate.fits) == (900 * MIB, True)
    PROPOSAL_RULES.clear()
    shrink(1, 1, 541 * MIB)
    (candidate,) = suggestions._list_candidates(b.context(900 * MIB))
    assert candidate.required_bytes > 900 * MIB and not candidate.fits


def test_expandable_segments_are_taken_to_waste_nothing(alone: None) -> None:
    b = TraceBuilder()
    b.free(b.alloc(400 * MIB))
    b.alloc(600 * MIB)

    @proposes(1, fix="expandable-segments")
    def propose(context: Context) -> Iterator[Proposal]:
        config = parse_config("expandable_segments:True")
        yield Proposal(context.ledger.trace, config=config)

    (candidate,) = suggestions._list_candidates(b.context(900 * MIB))
    assert candidate.required_bytes == 600 * MIB
    (found,) = suggest(b.context(900 * MIB))
    assert (found.required_bytes, found.num_bytes, found.fits) == (600 * MIB, 400 * MIB, True)


def test_a_tensor_as_large_as_the_gpu_is_helped_by_what_frees_others(alone: None) -> None:
    shrink(1, 0, 0)
    assert suggest(two_tensors(400, 600).context(600 * MIB)) and not suggest(two_tensors(400, 600).context(598 * MIB))


def test_what_was_refused_takes_nothing(alone: None) -> None:
    """The program has caught the error of the 900 MiB, and done without."""
    b = two_tensors()
    refused = b.alloc(900 * MIB)
    b.free(refused)
    b.trace.refused.append(refused)
    shrink(1, 0, 0)
    (found,) = suggest(b.context(1100 * MIB))
    assert (found.required_bytes, found.num_bytes) == (400 * MIB, 600 * MIB)


def test_a_run_on_the_cpu_is_replayed_in_host_memory(alone: None) -> None:
    """There each tensor takes its own size, and no GPU is there to fit."""
    b = two_tensors()
    context = Context(build_ledger(b.trace, replay_in_host_memory(b.trace)), None)
    shrink(1, 0, MIB)
    (found,) = suggest(context)
    assert (found.required_bytes, found.fits) == (401 * MIB, None)


def test_the_suggestions_of_a_finding_are_in_the_order_of_their_rules(alone: None) -> None:
    for order, mib in ((3, 0), (1, 300), (2, 100)):
        shrink(order, 0, mib * MIB, findings=("toy",))
    shrink(4, 0, 0)
    assert texts(suggest_against(two_tensors().context(), "toy")) == ["number 1", "number 2", "number 3"]


def test_a_new_file_is_a_new_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from memprof.findings.suggestions import Proposal, proposes\nfrom memprof.ledger.what_if import resize\n\n"
        "@proposes(1)\ndef propose(context):\n    yield Proposal(resize(context.ledger.trace, {0: 0}), 'toy')\n"
    )
    (tmp_path / "toy.py").write_text(text)
    package = memprof.findings.proposals
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        rules.import_rules()
        assert texts(suggest(two_tensors().context(700 * MIB)))[0] == "toy"
        with pytest.raises(ValueError, match="has place 1"):
            proposes(1)(lambda context: iter(()))
    finally:
        PROPOSAL_RULES.pop(1, None)
        sys.modules.pop("memprof.findings.proposals.toy", None)


@pytest.mark.parametrize(
    ("mib", "usable_mib", "ended", "is_cause"),
    [
        (350, 980, True, True),  # 250 MiB of 1000
        (352, 980, True, False),
        (598, 999, False, True),
        (598, 997, False, False),  # still does not fit
        (598, 1001, False, False),  # fits as it is
    ],
)
def test_what_a_change_takes_away_is_the_cause_if_the_run_fits_then(
    alone: None, mib: int, usable_mib: int, ended: bool, is_cause: bool
) -> None:
    """Of a run that memory ended, if it is a quarter of the need."""
    shrink(1, 0, mib * MIB, cures=("toy",))
    b = two_tensors()
    b.trace.ended_out_of_memory = ended
    context = b.context(usable_mib * MIB)
    assert is_cured(context, "toy") == is_cause
    assert not is_cured(context, "other")
