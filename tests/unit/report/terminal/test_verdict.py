"""The verdict on a rank counts with NCCL, which others measured alone: it may take what is left, or more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.exhaustion import Growth
from memprof.flows.account import analyze
from memprof.ledger.batches import Batches, BatchStep
from memprof.ledger.bridge import NCCL_GROUP_BYTES
from memprof.ledger.caught_errors import CaughtError
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.next_step import choose_next_step
from memprof.report.terminal.report import render
from memprof.report.terminal.verdict import _describe_waste, render_verdict
from memprof.run_spec import RunSpec
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def document() -> Report:
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 8 * GIB))
    b.phase(PhaseKind.FORWARD)
    b.free(b.new(MIB))
    b.phase(PhaseKind.ZERO_GRAD)
    b.new(0)
    return analyze(b.trace)


def said(document: Report, total_bytes: int, nccl: tuple[int, int] | None) -> str:
    assert document.bridge is not None
    document = dataclasses.replace(
        document,
        bridge=dataclasses.replace(document.bridge, nccl_group_bytes=nccl),
        device=dataclasses.replace(document.device, total_bytes=total_bytes),
    )
    return " ".join(to_text(render(document, quiet=True)).split())


@pytest.mark.parametrize(
    ("ended", "need"),
    [("refused", "It needs at least"), ("exit", "It needs")],
)
def test_of_a_run_that_memory_ended_the_need_is_a_lower_bound(ended: str, need: str) -> None:
    b = TraceBuilder()
    b.trace.facts = Facts(
        device=DeviceFacts("A", 8 * MIB, usable_bytes=8 * MIB), program=ProgramFacts(("a.py",), ended, None, 0, ())
    )
    b.new(6 * MIB)
    text = " ".join(to_text(render(analyze(b.trace), quiet=True)).split())
    assert f"{need} 24.00 MiB (24.00 of tensors, 0.00 of CUDA context)" in text


@pytest.mark.parametrize(
    ("missed", "said_of_it", "purpose"),
    [
        (
            {"misses_evaluation": True},
            "a later evaluation in its code was not reached",
            "check that its evaluation fits too",
        ),
        ({"misses_calls": True}, "not all of these calls were run", "check that all of these calls fit"),
        ({"misses_unfreezing": True}, "unfreezes parameters", "check that it fits with these parameters"),
        ({"misses_model": True}, "builds another model", "check that the next model fits too"),
        (
            {"idle_optimizers": 1},
            "an optimizer has made no step",
            "check that the steps of the other optimizer fit too",
        ),
        ({"idle_optimizers": 2}, "optimizers have made no", "check that the steps of the other optimizer fit too"),
        ({}, "", "check whether later steps need more"),
    ],
)
def test_before_what_may_need_more_a_run_fits_so_far(
    document: Report, missed: dict[str, Any], said_of_it: str, purpose: str
) -> None:
    program = ProgramFacts(("a.py",), "steps", None, 3, (), asked=RunSpec(), **missed)
    report = dataclasses.replace(document, program=program, source="simulated")
    text = said(report, 8 * GIB, None)
    assert text.startswith("Fits so far: " if missed else "Fits: ") and said_of_it in text
    retries = dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, retries=1))
    text = said(retries, 8 * GIB, None)
    assert text.startswith(f"Fits{' so far' if missed else ''}, with allocator retries: ") and said_of_it in text
    step = choose_next_step(report)
    assert step is not None and step[0] == purpose
    if missed:  # all steps of a long training are never run
        longer = (dataclasses.replace(program, planned_steps=steps) for steps in (1000, 1001))
        steps = [choose_next_step(dataclasses.replace(report, program=one)) for one in longer]
        assert ["--until-exit" in command for _, command in filter(None, steps)] == [True, False]


@pytest.mark.parametrize(
    ("ended", "peaks", "is_sought", "may_be_larger"),
    [
        ("steps", (60, 95, 98, 96, 100), False, True),
        ("steps", (60, 96, 98, 97, 100), False, False),  # by less than 5%
        ("exit", (60, 95, 98, 96, 100), False, False),  # there are no more
        ("steps", (60, 50, 100, 50, 100), False, False),  # steps of two optimizers, in turn
        ("steps", (60, 100, 98, 96, 95), True, False),  # --worst-batch found the largest
        ("steps", (60, 95, 100, 98, 96), True, True),  # in the first two steps; and here no data loader
    ],
)
def test_where_batches_differ_those_of_later_steps_may_need_more(
    document: Report, ended: str, peaks: tuple[int, ...], is_sought: bool, may_be_larger: bool
) -> None:
    steps = tuple(BatchStep(step, None, peak * MIB, 0, 0) for step, peak in enumerate(peaks, 1))
    asked = RunSpec(worst_batch=is_sought)
    changes = {"program": ProgramFacts(("a.py",), ended, None, 5, (), asked=asked, planned_steps=5000)}
    report = dataclasses.replace(document, batches=Batches(None, None, None, steps, ()), **changes)
    text = said(report, 8 * GIB, None)
    assert text.startswith("Fits so far: " if may_be_larger else "Fits: ")
    assert ("batches differ in size, and those of later steps may need more" in text) == may_be_larger
    step = choose_next_step(dataclasses.replace(report, source="simulated"))
    assert (step is not None and step[0] == "find what the largest batch needs") == (may_be_larger and not is_sought)


@pytest.mark.parametrize(("planned", "runs_all"), [(1000, True), (1001, False), (None, False)])
def test_up_to_a_thousand_steps_are_run_to_their_end(document: Report, planned: int | None, runs_all: bool) -> None:
    steps = tuple(BatchStep(step, None, peak * MIB, 0, 0) for step, peak in enumerate((60, 95, 98, 96, 100), 1))
    program = ProgramFacts(("a.py",), "steps", None, 5, (), asked=RunSpec(), planned_steps=planned)
    batches = Batches(None, None, None, steps, ())
    step = choose_next_step(dataclasses.replace(document, batches=batches, program=program, source="simulated"))
    assert step is not None
    assert step[0] == ("check that all of its steps fit" if runs_all else "find what the largest batch needs")


@pytest.mark.parametrize(
    ("stage", "source", "callers", "place"),
    [
        (
            "layer 3",
            "lib/model.py:9 forward",
            ("train.py:4 evaluate",),
            "at train.py:4 in evaluate(), in layer 3 of step 3",
        ),
        ("own code", "train.py:4 <module>", (), "at train.py:4, in step 3"),
        (
            "evaluation loss",
            "/lib/trainer.py:9 nested_concat",
            ("train.py:4 <module>",),
            "at train.py:4, in nested_concat (lib/trainer.py:9)",
        ),
        ("evaluation own code", "/lib/x.py:9 f", ("train.py:4 <module>",), "at train.py:4, in the evaluation"),
        ("layer 3", "/lib/x.py:9 f", (), "in layer 3 of step 3"),
    ],
)
def test_where_memory_runs_out(document: Report, stage: str, source: str, callers: tuple[str, ...], place: str) -> None:
    verdict = dataclasses.replace(
        document.verdict, fits=False, oom_stage=stage, oom_step=3, oom_source=source, oom_callers=callers
    )
    for ended, size in (("refused", "at least 30.00 GiB"), ("exit", "30.00 GiB")):
        program = ProgramFacts(("a.py",), ended, None, 3, ())
        device = dataclasses.replace(document.device, total_bytes=24 * GIB)
        needs = dataclasses.replace(verdict, required_bytes=30 * GIB)
        one = dataclasses.replace(document, verdict=needs, program=program, device=device)
        text = " ".join(to_text(render_verdict(one, is_short=True)).split())
        assert text == f"Does not fit: out of memory {place}. It needs {size}; the GPU has 24.00 GiB."
        first = dataclasses.replace(one, verdict=dataclasses.replace(needs, oom_step=2))
        text = " ".join(to_text(render_verdict(first, is_short=True)).split())
        assert text.startswith(f"Does not fit: out of memory {place}. ") == ("step" not in place)
    needs = dataclasses.replace(verdict, required_bytes=24 * GIB + 1)
    one = dataclasses.replace(document, verdict=needs, device=device, program=program)
    text = " ".join(to_text(render_verdict(one, is_short=True)).split())
    assert text.endswith("It needs more than the 24.00 GiB of the GPU.")


@pytest.mark.parametrize(
    ("ended", "steps", "planned", "words"),
    [
        ("steps", 1, None, "1 training step needs "),
        ("steps", 25, 25, "25 training steps need "),
        ("steps", 25, 1026, "25 of about 1,026 training steps need "),
        ("exit", 25, 25, "needs "),
    ],
)
def test_a_run_that_was_stopped_fits_for_its_steps(
    document: Report, ended: str, steps: int, planned: int | None, words: str
) -> None:
    program = ProgramFacts(("a.py",), ended, None, steps, (), planned_steps=planned)
    document = dataclasses.replace(document, program=program)
    assert said(document, 8 * GIB, None).startswith(f"Fits: {words}")


@pytest.mark.parametrize(
    ("evaluation_step", "where", "command"),
    [
        (999, " (it comes after step 999)", "memprof run --steps 1000 --gpu h100-80gb a.py"),
        (1000, " (it comes after step 1,000)", None),
        (None, "", None),
    ],
)
def test_the_evaluation_of_a_long_training_is_run_if_its_step_is_known(
    document: Report, evaluation_step: int | None, where: str, command: str | None
) -> None:
    program = ProgramFacts(("a.py",), "steps", None, 25, (), asked=RunSpec(), planned_steps=700_000)
    program = dataclasses.replace(program, evaluated=False, misses_evaluation=True, evaluation_step=evaluation_step)
    document = dataclasses.replace(document, program=program, source="simulated")
    assert f"; the evaluation in its code was not reached{where}." in said(document, 8 * GIB, None)
    assert (choose_next_step(document) or (None, None))[1] == command


def test_what_the_gpu_must_have_includes_the_context() -> None:
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 8 * GIB, 8 * GIB - 426 * MIB, 426 * MIB))
    b.new(MIB)
    document = analyze(b.trace)
    # Of 4 MiB, a segment of 20.
    assert document.peak.device_used_bytes == document.verdict.required_bytes == (20 + 426) * MIB
    assert (document.stages[0].name, document.stages[0].device_used_bytes) == ("context", 426 * MIB)
    assert said(document, 8 * GIB, None).startswith(
        "Fits: needs 446.00 MiB (4.00 of tensors, 16.00 cached, 426.00 of CUDA context), 7.56 GiB to spare"
    )


@pytest.mark.parametrize(
    ("growth", "text"),
    [
        (
            Growth(8 * MIB, 8 * MIB, 5, 5, None),
            "Memory grows by 8.00 MiB a step; the script ended with step 5, before the GPU was full.",
        ),
        (Growth(8 * MIB, 16 * MIB, 5, None, None), "Memory grows by 8.00 MiB a step (its peak by 16.00 MiB)."),
        (
            Growth(8 * MIB, 8 * MIB, 5, 90, 1500),
            "Memory grows by 8.00 MiB a step, and fits until about step 1,500; the script makes about 90 steps.",
        ),
    ],
)
def test_a_run_that_grows(document: Report, growth: Growth, text: str) -> None:
    document = dataclasses.replace(document, verdict=dataclasses.replace(document.verdict, growth=growth))
    assert said(document, 8 * GIB, None).endswith(f" to spare. {text}")


def test_without_nccl(document: Report) -> None:
    assert said(document, 8 * GIB, None).endswith("to spare.")


def test_with_room_for_it(document: Report) -> None:
    text = said(document, 8 * GIB, NCCL_GROUP_BYTES)
    assert text.startswith("Fits: needs")
    assert text.endswith("to spare, of which NCCL takes 544.00 MiB to 1.49 GiB a group where others measured it.")


def test_without_room_for_all_that_it_may_take(document: Report) -> None:
    used = document.peak.device_used_bytes
    text = said(document, used + GIB, NCCL_GROUP_BYTES)
    assert text.startswith("Fits without headroom for NCCL: needs")
    assert "which leaves 1.00 GiB to NCCL: where others measured it, a group takes 544.00 MiB to 1.49 GiB." in text


@pytest.mark.parametrize(("allocated", "is_told"), [(79 * MIB, True), (80 * MIB, False), (81 * MIB, False)])
def test_what_failed_attempts_have_left_reserved_is_told_where_it_is_a_fifth(
    document: Report, allocated: int, *, is_told: bool
) -> None:
    caught = CaughtError("forward", 1, MIB, (1,), "float32", "aten.mm", None, None, MIB)
    document = dataclasses.replace(
        document,
        verdict=dataclasses.replace(document.verdict, first_caught=caught, out_of_memory_caught=1),
        peak=dataclasses.replace(document.peak, allocated_bytes=allocated, reserved_bytes=100 * MIB),
    )
    text = " ".join(to_text(render(document, quiet=True)).split())
    assert (f"tensors take at most {allocated // MIB}.00 MiB of the 100.00 MiB reserved" in text) == is_told


@pytest.mark.parametrize(
    ("tried_mib", "in_use_mib", "reserved_mib", "said"),
    [
        (40, 60, 90, " and 30.00 MiB cached in pieces too small for this allocation"),  # 60 + 40 of 100 would fit
        (2, 60, 90, " and 30.00 MiB cached for tensors above 1 MiB"),  # a segment of the small pool
        (40, 61, 90, ""),  # tensors alone are too many
        (40, 60, 60, ""),  # a limit of the program's own: nothing is cached
    ],
)
def test_what_is_cached_is_told_where_tensors_leave_room(
    document: Report, tried_mib: int, in_use_mib: int, reserved_mib: int, said: str
) -> None:
    verdict = dataclasses.replace(
        document.verdict,
        tried_to_allocate_bytes=tried_mib * MIB,
        in_use_bytes=in_use_mib * MIB,
        reserved_bytes=reserved_mib * MIB,
    )
    assert _describe_waste(dataclasses.replace(document, verdict=verdict), 100 * MIB) == said


@pytest.mark.parametrize(("step", "told"), [(1, ""), (2, ""), (3, ", in step 3")])
def test_the_first_two_steps_have_no_number_where_memory_runs_out(document: Report, step: int, told: str) -> None:
    out = {"oom_stage": "own code", "oom_step": step, "oom_source": "train.py:4 <module>", "oom_callers": ()}
    verdict = dataclasses.replace(document.verdict, fits=False, **out)
    program = ProgramFacts(("a.py",), "refused", None, step, ())
    report = dataclasses.replace(document, verdict=verdict, program=program)
    text = " ".join(to_text(render_verdict(report, is_short=True)).split())
    assert text.startswith(f"Does not fit: out of memory at train.py:4{told}. It needs")
    without_optimizer = dataclasses.replace(report, stages=document.stages[:-1])
    assert "at train.py:4. It needs" in to_text(render_verdict(without_optimizer, is_short=True))
    setup = dataclasses.replace(report, verdict=dataclasses.replace(verdict, oom_stage="parameters"))
    after = told.replace("in step 3", "after step 2")
    assert f"at train.py:4{after}. It needs" in to_text(render_verdict(setup, is_short=True))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (PhaseKind.OPTIMIZER_STEP, ", in step 3"),
        (PhaseKind.ZERO_GRAD, ", in step 3"),
        (PhaseKind.BACKWARD, ""),
    ],
)
def test_a_step_is_one_of_an_optimizer(document: Report, kind: PhaseKind, told: str) -> None:
    out = {"oom_stage": "own code", "oom_step": 3, "oom_source": "train.py:4 <module>", "oom_callers": ()}
    verdict = dataclasses.replace(document.verdict, fits=False, **out)
    rows = (dataclasses.replace(document.stages[0], kind=kind),)
    program = ProgramFacts(("a.py",), "refused", None, 3, ())
    report = dataclasses.replace(document, verdict=verdict, program=program, stages=rows)
    assert f"at train.py:4{told}. It needs" in to_text(render_verdict(report, is_short=True))


@pytest.mark.parametrize(("steps", "words"), [(None, "; no end of its steps was seen"), (1200, " of about 1,200")])
def test_a_run_that_grows_until_the_gpu_is_full(document: Report, steps: int | None, words: str) -> None:
    verdict = dataclasses.replace(document.verdict, fits=False, growth=Growth(8 * MIB, 8 * MIB, 5, steps, 1100))
    text = said(dataclasses.replace(document, verdict=verdict), 8 * GIB, None)
    assert text.startswith(f"Does not fit: runs out of memory at about step 1,100{words}. The first 5 steps, ")


@pytest.mark.parametrize("prefix", ["", "evaluation "])
def test_a_layer_is_told_as_the_module_that_it_is(document: Report, prefix: str) -> None:
    out = {"oom_stage": f"{prefix}layer 3", "oom_step": 1, "oom_source": "train.py:4 <module>", "oom_callers": ()}
    verdict = dataclasses.replace(document.verdict, fits=False, **out)
    program = ProgramFacts(("a.py",), "refused", None, 1, ())
    row = dataclasses.replace(document.stages[0], name=out["oom_stage"], oom=True, stack="encoder.layer", index=3)
    other = dataclasses.replace(row, oom=False, index=2)
    report = dataclasses.replace(document, verdict=verdict, program=program, stages=[other, row])
    text = " ".join(to_text(render_verdict(report, is_short=True)).split())
    words = " of the evaluation" if prefix else ""
    assert text.startswith(f"Does not fit: out of memory at train.py:4, in module encoder.layer.3{words}. It needs")


@pytest.mark.parametrize(
    ("cause", "ended", "is_growing"),
    [
        ("memory-growth", "refused", True),
        ("evaluation-accumulates", "refused", True),
        ("idle-memory", "refused", False),
        ("memory-growth", "exit", False),
    ],
)
def test_what_grows_has_no_need_where_memory_ended_it(
    document: Report, cause: str, ended: str, is_growing: bool
) -> None:
    out = {"oom_stage": "own code", "oom_step": 1, "oom_source": "train.py:4 <module>", "oom_callers": ()}
    verdict = dataclasses.replace(document.verdict, fits=False, required_bytes=9 * GIB, **out)
    program = ProgramFacts(("a.py",), ended, None, 1, ())
    finding = Finding(cause, Severity.WARNING, "", None, (), (), is_decisive=True)
    report = dataclasses.replace(document, verdict=verdict, program=program, findings=[finding])
    text = " ".join(to_text(render_verdict(report, is_short=True)).split())
    told = "It needs more than the 8.00 GiB of the GPU, and more the longer it runs."
    assert text.endswith(told) is is_growing and ("9.00 GiB; the GPU has 8.00 GiB" in text) is not is_growing
