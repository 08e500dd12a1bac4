"""torch.profiler in a program: in a process of its own, for what went wrong ended it."""

import subprocess
import sys

import pytest

PROGRAM = """
import memprof, torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
with memprof.virtual_gpu():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU()).cuda()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], {options}) as found:
        model(torch.randn(4, 10, device="cuda")).sum().backward()
    print(any(row.key == "aten::randn" for row in found.key_averages()))
"""


@pytest.mark.parametrize("options", ["with_stack=True, profile_memory=True, record_shapes=True", "with_stack=True"])
def test_a_program_profiles_itself(options):
    code = PROGRAM.format(options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "True"
    assert done.stderr.count("\n") < 5, done.stderr[:2000]
