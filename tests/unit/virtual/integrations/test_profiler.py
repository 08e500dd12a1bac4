"""torch.profiler in a program: in a process of its own, for what went wrong ended it."""

import pytest

from tests.processes import python

PROGRAM = """
import memprof, torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
for options in ({"with_stack": True, "profile_memory": True, "record_shapes": True}, {"with_stack": True}):
    with memprof.virtual_gpu():
        model = nn.Sequential(nn.Linear(10, 10), nn.ReLU()).cuda()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], **options) as found:
            model(torch.randn(4, 10, device="cuda")).sum().backward()
        print(any(row.key == "aten::randn" for row in found.key_averages()))
"""


@pytest.mark.nightly
def test_a_program_profiles_itself():
    done = python("-c", PROGRAM)
    assert done.exit_code == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr.count("\n") < 5, done.stderr[:2000]
