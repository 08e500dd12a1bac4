"""The command to try next, which every report ends with: it runs, and shows what was said."""

import dataclasses
import json
import re
import shlex

import pytest

from memprof.flows.saved_files import load_json
from memprof.report.terminal.console import to_text
from memprof.report.terminal.next_step import choose_next_step
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
        ("run", "whether its evaluation fits too", "memprof run --until-exit --gpu h100-80gb program.py"),
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


def printed(text):
    (found,) = re.findall(r"^(?:Next, |  - ).*:\n +(memprof .*)$", re.sub(r" \\\n\s*", " ", text), re.MULTILINE)
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
