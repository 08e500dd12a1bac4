"""Phases of programs that no optimizer tells apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.flows.script import run_script
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.trace.events import PhaseKind, Role
from memprof.virtual import VirtualGpu

WITHOUT_OPTIMIZER = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).cuda()
for step in range(6):
    model.train()
    model.zero_grad()
    model(torch.randn(16, 64, device="cuda")).mean().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 64, device="cuda"))
"""


def test_a_program_that_steps_itself_has_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_OPTIMIZER)
    stopped, whole = (
        run_script(Program(str(script)), StopRule(steps), RunSpec(gpu="a100-80gb")).document for steps in (2, None)
    )
    assert stopped.program is not None and whole.program is not None
    assert (stopped.program.ended, stopped.program.steps) == (EndReason.STEPS, 2)
    assert (whole.program.ended, whole.program.steps) == (EndReason.EXIT, 6)
    assert {row.step for row in whole.stages if row.name == "evaluation 0 Linear"} == set(range(1, 7))


INNER_LOOP = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    weight = model.weight
    for _ in range(3):
        loss = (model(torch.randn(16, 64, device="cuda")) + weight.sum()).mean()
        weight = weight - 0.1 * torch.autograd.grad(loss, weight, create_graph=True)[0]
    weight.sum().backward()
    model(torch.randn(16, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_that_are_not_accumulated_make_no_micro_batch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INNER_LOOP)
    document = run_script(Program(str(script)), StopRule(None), RunSpec(gpu="a100-80gb")).document
    assert document.program is not None and document.program.steps == 2
    assert {row.micro_batch for row in document.stages if row.name == "backward"} == {1, 2}


WITHOUT_MODULES = """
import torch

weight = torch.randn(64, 64, device="cuda", requires_grad=True)
for _ in range(3):
    (torch.randn(16, 64, device="cuda") @ weight).mean().backward()
"""


def test_each_backward_is_a_micro_batch_where_no_module_is_called(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_MODULES)
    document = run_script(Program(str(script)), StopRule(None), RunSpec(gpu="a100-80gb")).document
    assert {row.micro_batch for row in document.stages if row.name == "backward"} == {1, 2, 3}


EVALUATION_WITH_GRADIENTS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 64, device="cuda")).mean().backward()
optimizer.step()
model.eval()
model(torch.randn(16, 64, device="cuda"))
"""


def test_a_last_evaluation_is_no_training_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EVALUATION_WITH_GRADIENTS)
    document = run_script(Program(str(script)), StopRule(None), RunSpec(gpu="a100-80gb")).document
    assert document.program is not None and document.program.steps == 1


MOVED_LAST = """
import torch
from torch import nn

model = nn.GRU(64, 64)
optimizer = torch.optim.Adam(model.parameters())
model.cuda()
for step in range(2):
    model(torch.randn(8, 4, 64, device="cuda"))[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_optimizer_made_before_the_model_is_moved_leaves_one_row_of_parameters(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MOVED_LAST)
    document = run_script(Program(str(script)), StopRule(None), RunSpec(gpu="a100-80gb")).document
    (row,) = (stage for stage in document.stages if stage.name == "parameters")
    assert row.delta_bytes >= 4 * 2 * 3 * 64 * (64 + 1)  # weights and biases, of the input and of the state


def folds_that_are_kept() -> Iterator[torch.optim.Optimizer]:
    optimizers = []
    for _ in range(3):
        optimizers.append(torch.optim.SGD(torch.nn.Linear(8, 8).cuda().parameters(), lr=0.1))
        yield from optimizers[-1:] * 3


def two_that_alternate() -> Iterator[torch.optim.Optimizer]:
    pair = [torch.optim.SGD(torch.nn.Linear(8, 8).cuda().parameters(), lr=0.1) for _ in range(2)]
    yield from pair * 4


def one_more_often() -> Iterator[torch.optim.Optimizer]:
    critic, generator = (torch.optim.SGD(torch.nn.Linear(8, 8).cuda().parameters(), lr=0.1) for _ in range(2))
    yield from [critic, critic, critic, generator] * 2


@pytest.mark.parametrize(
    ("program", "num_steps"),
    [
        (folds_that_are_kept, 9),  # no step waits for the optimizer of an earlier fold
        (two_that_alternate, 4),
        (one_more_often, 7),  # a generator's step is one with a critic's, but for the last, which none follows
    ],
)
def test_steps_of_several_optimizers(program, num_steps: int) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        for optimizer in program():
            weight, bias = optimizer.param_groups[0]["params"]
            torch.nn.functional.linear(torch.ones(2, 8, device="cuda"), weight, bias).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert max(phase.step for phase in gpu.trace.phases) == num_steps


def test_gradients_that_the_program_sets_itself_begin_steps() -> None:
    with memprof.virtual_gpu("a100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    assert [phase.step for phase in gpu.trace.phases if phase.kind is PhaseKind.OPTIMIZER_STEP] == [1, 2, 3]


def test_what_is_moved_later_is_a_parameter_also_if_it_is_never_called() -> None:
    with memprof.virtual_gpu("a100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        model(torch.randn(8, 64, device="cuda")).mean().backward()
        torch.nn.Sequential(torch.nn.Linear(8, 512)).cuda()
        found = {gpu.trace.storages[index].shape: owner.role for index, owner in gpu.trace.owners.items()}
    assert found[512, 8] is Role.PARAMETER


@pytest.mark.parametrize(("behind_step", "evaluated"), [(True, True), (False, False)])
def test_a_call_without_gradients_behind_a_step_is_an_evaluation_in_training_mode_too(
    behind_step: bool, evaluated: bool
) -> None:
    model = torch.nn.Linear(8, 8)
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.ones(2, 8, device="cuda")
        for _ in range(2):
            loss = model(x).sum()
            if not behind_step:
                with torch.no_grad():
                    model(x)  # a target, within the step
            loss.backward()
            optimizer.step()
        if behind_step:
            with torch.no_grad():
                model(x)
    assert gpu.phases.has_evaluated == evaluated
