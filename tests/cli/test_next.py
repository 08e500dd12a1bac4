"""The command to try next, which every report ends with (unit/report/terminal/test_next_step.py has which) runs."""

import re
import shlex

import pytest

SCRIPT = """
import torch
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


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
