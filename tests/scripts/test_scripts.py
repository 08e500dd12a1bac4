"""Scripts as users write them run unmodified on the virtual GPU, to their second step and to their end.

Beside this file, test_trainers.py does the same with trainers of libraries: two files, so that two workers share them.
"""

from __future__ import annotations

import pytest

from memprof.cli.output import choose_exit_code
from memprof.flows.script import DryRun, run_script
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule
from tests.lanes import by_day
from tests.scripts.running import check_sound, memprof_run, program, run_twice, stages

STEP = {"backward", "optimizer step"}
SCRIPTS = {
    "char_gpt": (
        ("--compile=False",),
        STEP | {"embedding", "layer 0", "logits", "loss"},
        {"evaluation", "checkpoint", "logits"},
        5,
    ),
    "accelerate_loop": ((), STEP | {"layer 0", "loss"}, {"evaluation", "checkpoint"}, 6),
    "images": (("--amp", "--ema"), STEP | {"loss"}, {"evaluation", "checkpoint"}, 6),
    "lightning_module": (("--rows", "16"), {"backward", "layer 0", "loss"}, {"evaluation", "checkpoint"}, 4),
    "generate": ((), {"embedding", "layer 0", "logits"}, {"decode"}, 0),
}


@pytest.mark.parametrize("name", by_day(SCRIPTS, "char_gpt"))
def test_it_runs(name, tmp_path):
    arguments, in_step, beside, steps = SCRIPTS[name]
    found = run_twice(name, *arguments, folder=tmp_path)
    for way, told in found.items():
        if way == "stderr":
            continue
        report = told["report"]
        assert told["exit_code"] == 0, found["stderr"][-3000:]
        check_sound(report)
        assert report["program"]["exit_code"] == 0
        assert in_step <= stages(report, 1)
        if way == "stopped" and name != "generate":
            assert report["program"]["ended"] == "steps"
            assert report["program"]["steps"] in (2, 3)  # one more where the second left more behind
        else:
            assert (report["program"]["ended"], report["program"]["steps"]) == ("exit", steps)
            assert beside <= stages(report)
    if name != "generate":
        # The steady state that the default stop rests on: steps after the first end as the one before.
        rows = [row for row in found["to the end"]["report"]["stages"] if row["name"] == "backward"]
        ends = [[row["requested_bytes"] for row in rows if row["step"] == step][-1] for step in (steps - 1, steps)]
        assert ends[0] == ends[1]


def mistakes(keep: str, rule: StopRule) -> DryRun:
    """That program in this process: torch is all it imports."""
    script, *arguments = program("mistakes", "--keep", keep)
    return run_script(Program(script, tuple(arguments)), rule, RunSpec(gpu="h100-80gb"))


def test_mistakes_are_found():
    for rule in (StopRule(), StopRule(None)):
        found = mistakes("losses,logits,rope", rule)
        # On a real GPU it dies of the first: that is an error, though the run goes on to show the rest.
        assert found.document.failure is None and found.outcome.exit_code == 0
        assert choose_exit_code(found.document) == 1
        errors = [finding for finding in found.document.findings if finding.severity.value == "error"]
        assert {finding.id for finding in errors} == {"device-mismatch"}
        assert "mistakes.py:" in errors[0].title


def test_what_is_kept_grows():
    """Four steps' logits of [2, 16, 128] float32, and what their losses keep."""
    ends = {}
    for keep in ("losses,logits", "nothing"):
        document = mistakes(keep, StopRule(None)).document
        assert choose_exit_code(document) == 0
        ends[keep] = [row.requested_bytes for row in document.stages if row.name == "optimizer step"]
    assert ends["nothing"][1:] == ends["nothing"][1:2] * 3
    second, third, fourth = ends["losses,logits"][1:]
    assert fourth - third == third - second >= 2 * 16 * 128 * 4


def test_a_gpu_that_is_too_small(tmp_path):
    """The script's own handler catches what a real GPU would raise; the verdict is that it does not fit."""
    size = ("--hidden", "2048", "--layers", "16", "--heads", "16", "--vocab", "32000", "--length", "2048")
    code, report, said = memprof_run(
        "--gpu", "rtx-4090", of=program("mistakes", *size, "--batch", "8", "--keep", "logits"), folder=tmp_path
    )
    assert code == 3, said[-3000:]
    assert "out of memory: CUDA out of memory. Tried to allocate " in said
    assert not report["verdict"]["fits"] and report["verdict"]["oom_step"] == 1
