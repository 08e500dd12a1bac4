"""A program of DeepSpeed's ZeRO 3 in outline: its optimizer steps torch's once for each group of parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memprof.flows.script import run_script
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule

MIB = 1 << 20
STAGE3 = """
import torch
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle


class DeepSpeedZeroOptimizer_Stage3:
    def __init__(self, optimizer, model):
        self.optimizer = optimizer
        self.weights = list(model.parameters())
        self.param_groups[0]["params"] = []
        flat = torch.cat([one.data.view(-1)[: 1 << 20] for one in self.weights]).bfloat16()
        for number, one in enumerate(self.weights):
            one.ds_tensor, one.data = flat.narrow(0, number << 20, 1 << 20), torch.empty(0, device="cuda")
        self.masters = [one.ds_tensor.float().clone() for one in self.weights]
        self.initialize_optimizer_states()
        self.grad_partitions_flat_buffer = torch.zeros(2 << 20, device="cuda", dtype=torch.bfloat16)

    def initialize_optimizer_states(self):
        for master in self.masters:
            master.grad = torch.zeros_like(master)
            self.param_groups[0]["params"] = [master]
            self.optimizer.step()
            self.param_groups[0]["params"] = []
            master.grad = None

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def gather(self):
        handle = AllGatherCoalescedHandle()
        handle.params = self.weights
        handle.wait()

    def step(self):
        for one, master in zip(self.weights, self.masters):
            one.data = torch.empty(0, device="cuda")
            master.grad = self.grad_partitions_flat_buffer[: 1 << 20].float()
            self.param_groups[0]["params"] = [master]
            self.optimizer.step()
            self.param_groups[0]["params"] = []
            master.grad = None
"""
HANDLE = """
import torch


class AllGatherCoalescedHandle:
    def wait(self):
        for one in self.params:
            one.data = torch.cat([one.ds_tensor] * 4).view(2048, 2048)


class AllGatherHandle:
    def wait(self):
        pass
"""
TRAIN = """
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(2)]).bfloat16()
optimizer = DeepSpeedZeroOptimizer_Stage3(torch.optim.Adam(model.parameters()), model)
for step in range(4):
    optimizer.gather()
    model(torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)).sum().backward()
    for one in model.parameters():
        one.grad = None
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "deepspeed/runtime/zero"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "stage3.py").write_text(STAGE3)
    (folder / "partition_parameters.py").write_text(HANDLE)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield str(tmp_path / "train.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def document(script: str) -> Report:
    result = run_script(Program(script), StopRule(2), RunSpec(gpu="a100-80gb")).document
    assert result is not None
    return result


def test_a_step_of_zero_is_one_step(document: Report) -> None:
    assert document.program is not None and document.program.steps == 2
    assert [row.step for row in document.stages if row.name == "optimizer step"] == [1, 2]


def test_what_zero_keeps_has_a_name(document: Report) -> None:
    assert document.peak.stage == "backward"
    found = {name: num_bytes // MIB for name, num_bytes in document.peak.categories.items() if num_bytes >= MIB}
    assert found["parameters"] == 4 + 2 * 4  # this rank's parts in bfloat16, and in float32
    assert found["optimizer state"] == 16
    assert found["gradients"] == 4 + 2 * 8  # the buffer, and those of whole parameters
    assert found["unsharded parameters"] == 2 * 8
