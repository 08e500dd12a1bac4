"""The command to try next, which every report ends with: it runs, and shows what was said."""

import dataclasses
import json
import re
import shlex

import pytest

from memprof.findings import Finding, Severity
from memprof.flows.saved_files import load_json
from memprof.report.terminal.console import to_text
from memprof.report.terminal.next_step import choose_next_step, render_next_step
from memprof.report.terminal.report import render
from memprof.spec import TargetSpec
from tests.docs.test_docs import _check
from tests.golden.commands import KEPT

SCRIPT = """
import torch
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def saved(name, tmp_path, **changes):
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"memprof_version": "", **json.loads((KEPT / f"{name}.json").read_text())}))
    return dataclasses.replace(load_json(file), **changes)


def without_room(run):
    """`run` as if it did not fit, and a fix that `run --fix` switches on were known to help."""
    finding = Finding("does-not-fit", Severity.ERROR, "", None, (), ("activation-checkpointing",))
    return dataclasses.replace(run, verdict=dataclasses.replace(run.verdict, fits=False), findings=(finding,))


@pytest.mark.parametrize(
    ("name", "what", "command"),
    [
        (
            "profile",
            "the largest batch that fits",
            "memprof profile --model gpt2 --context-length 64 --batch-size 2 --gpu h100-80gb --largest batch-size",
        ),
        (
            "profile-does-not-fit",
            "the fixes that make it fit at the least cost",
            "memprof profile --model llama-3.1-8b --context-length 512 --gpu rtx-4090 --fix auto",
        ),
        (
            "profile-ladder",
            "the first row that fits, in full",
            "memprof profile --model gpt2 --context-length 256 --batch-size 4 --gpu-vram 2.5 --fix "
            "compile,8-bit-optimizer,chunked-loss",
        ),
        ("run", "whether later steps take more", "memprof run --steps 20 --gpu h100-80gb program.py"),
        ("run-until-exit", "what each finding means", "memprof help findings"),
    ],
)
def test_after_a_report(name, what, command, tmp_path):
    document = saved(name, tmp_path)
    assert choose_next_step(document) == (what, command)
    _check(shlex.split(command)[1:])
    ending = to_text(render(document)).splitlines()[-6:]
    said = re.sub(r" \\\n\s*", " ", "\n".join(ending))
    assert said.endswith(f"Next, {what}:\n  {command}")
    assert "Next, " not in to_text(render(document, quiet=True))


def test_where_fixes_are_not_enough(tmp_path):
    """What is asked of `recommend` is the same model, goal and GPU, and nothing that it does not take."""
    document = saved("profile-does-not-fit", tmp_path)
    for asked in (
        document.target.asked.edit(fixes=("chunked-loss",)),
        TargetSpec(model="4B", model_is_size=True, adapter="lora", gpu_vram_bytes=8 << 30, fixes=("bfloat16",)),
        TargetSpec(model="gpt2", mode="inference", batch_size=99, fixes=("bfloat16",)),
    ):
        target = dataclasses.replace(document.target, asked=asked)
        what, command = choose_next_step(dataclasses.replace(document, target=target))
        assert what.startswith("what would fit this GPU") and command.startswith("memprof recommend --model")
        _check(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 1000}, {"freeze": "wte*"}, {"evaluate": True}, {"npt": "low-rank"}, {"lora_dropout": 0.1}],
)
def test_recommend_is_not_asked_for_a_run_that_it_does_not_know(changes, tmp_path):
    document = saved("profile-does-not-fit", tmp_path)
    adapter = {"adapter": "lora"} if "lora_dropout" in changes else {}
    asked = TargetSpec(model="gpt2", fixes=("chunked-loss",), **changes, **adapter)
    target = dataclasses.replace(document.target, asked=asked)
    assert choose_next_step(dataclasses.replace(document, target=target))[1] == "memprof help fixes"


def test_after_a_script(tmp_path):
    run = saved("run", tmp_path)
    verdict, program = run.verdict, run.program
    asked = program.asked
    unknown = dataclasses.replace(run, verdict=dataclasses.replace(verdict, fits=None))
    assert choose_next_step(unknown)[1] == "memprof run --until-exit --gpu h100-80gb program.py"
    full = without_room(run)
    assert choose_next_step(full)[1] == "memprof run --steps 3 --gpu h100-80gb --fix auto program.py"
    with_bfloat16 = dataclasses.replace(program, fixes=("bfloat16",), asked=asked.edit(fixes=("bfloat16",)))
    fixed = dataclasses.replace(full, program=with_bfloat16)
    assert choose_next_step(fixed)[1] == "memprof help fixes"
    own = asked.edit(gpu_vram_bytes=6 << 30, worst_batch=True)
    spaced = dataclasses.replace(
        run, program=dataclasses.replace(program, command=("-m", "my pack", "--n", "2"), asked=own)
    )
    assert choose_next_step(spaced)[1] == "memprof run --worst-batch --steps 20 --gpu-vram 6 -m 'my pack' --n 2"
    for document in (unknown, full, fixed, spaced):
        _check(shlex.split(choose_next_step(document)[1])[1:])


def test_a_run_that_was_timed_out_is_shown_to_its_end(tmp_path):
    run = saved("run", tmp_path)
    timed = dataclasses.replace(run.program, ended="timeout", asked=run.program.asked.edit(timeout=1.5))
    stopped = dataclasses.replace(run, program=timed, verdict=dataclasses.replace(run.verdict, fits=None))
    assert choose_next_step(stopped)[1] == "memprof run --until-exit --gpu h100-80gb program.py"


def test_a_capture_that_does_not_say_how_it_was_run_has_no_command(tmp_path):
    run = saved("run", tmp_path)
    early = dataclasses.replace(run, program=dataclasses.replace(run.program, asked=None))
    assert choose_next_step(early) in (None, ("what each finding means", "memprof help findings"))


def test_without_a_command_line_nothing_is_said(tmp_path):
    document = saved("run", tmp_path, command="virtual_gpu", program=None)
    assert choose_next_step(document) is None and render_next_step(choose_next_step(document)) == []


def printed(text):
    (found,) = re.findall(r"^Next, .*:\n  (memprof .*)$", re.sub(r" \\\n\s*", " ", text), re.MULTILINE)
    return shlex.split(found)[1:]


@pytest.mark.slow
def test_they_run(memprof, script, tmp_path):
    """From a script to its later steps; from a recording to its allocator; from two to what differs."""
    first = memprof("run", "--steps", 2, "--gpu-vram", 2, "--save", "a.memprof", script(SCRIPT))
    more = memprof(*printed(first.stdout))
    assert more.exit_code == 0 and "ran to its end, 3 training steps" in more.stdout
    assert printed(memprof("show", "a.memprof").stdout) == printed(first.stdout)

    words = printed(memprof("analyze", "a.memprof").stdout)
    assert words[:2] == ["analyze", "a.memprof"]
    said = memprof(*words)
    assert said.exit_code == 0
    assert memprof(*printed(said.stdout)).exit_code == 0

    larger = script(SCRIPT.replace("randn(8", "randn(512"), "larger.py")
    assert memprof("run", "--gpu-vram", 2, "--save", "b.memprof", larger).exit_code == 0
    words = printed(memprof("compare", "a.memprof", "b.memprof").stdout)
    assert words[:3] == ["compare", "a.memprof", "b.memprof"] and memprof(*words).exit_code == 4
    assert "Next" not in memprof("compare", "a.memprof", "a.memprof").stdout
