"""cpu-offload-optimizer and fused-optimizer: real torch optimizers, in a loop with a scheduler, saved and loaded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import memprof
from memprof.errors import UsageError
from memprof.trace.events import PhaseKind
from tests.unit.fixes import models


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def offload(model, factory=adamw, **options):
    return memprof.apply(model, "cpu-offload-optimizer", optimizer=factory, **options).results["cpu-offload-optimizer"]


def run(model, optimizer, steps=4, accumulate=1, clip=None):
    """Parameters after some steps with a scheduler."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for step in range(steps):
        for part in range(accumulate):
            torch.manual_seed(10 * step + part)
            ids = torch.randint(0, models.VOCAB, (2, 9))
            model(input_ids=ids, labels=ids).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("given", [{}, {"offload_gradients": True}])
def test_the_same_training(given, accumulate):
    model = models.llama()
    twin = copy.deepcopy(model)
    wanted = run(model, adamw(model.parameters()), accumulate=accumulate)
    optimizer = offload(twin, **given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = run(twin, optimizer, accumulate=accumulate)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_clipping_reaches_the_step():
    model = models.llama()
    twin = copy.deepcopy(model)
    wanted = run(model, adamw(model.parameters()), clip=0.01)
    found = run(twin, offload(twin), clip=0.01)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def groups(parameters):
    large = [parameter for parameter in parameters if parameter.dim() > 1]
    small = [parameter for parameter in parameters if parameter.dim() < 2]
    return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)


def test_checkpoints_go_from_one_to_the_other():
    model = models.llama()
    twin = copy.deepcopy(model)
    plain, host = groups(list(model.parameters())), offload(twin, groups)
    run(model, plain)
    run(twin, host)
    saved = pickle.loads(pickle.dumps(host.state_dict()))
    wanted = plain.state_dict()
    assert saved["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(saved["state"], wanted["state"], rtol=0, atol=0)
    # Another process: new objects, the old state.
    again, other = copy.deepcopy(model), copy.deepcopy(model)
    third, fourth = offload(again, groups), groups(list(other.parameters()))
    third.load_state_dict(wanted)
    fourth.load_state_dict(saved)
    assert third.param_groups[1]["lr"] == wanted["param_groups"][1]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(run(again, third), run(other, fourth), strict=True))


def test_what_is_loaded_into_the_model_counts():
    """Weights that are written after the optimizer was made are the ones that are updated."""
    model, source = models.llama(), models.llama()
    optimizer = offload(model)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(source.state_dict())
    wanted = run(source, adamw(source.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(run(model, optimizer), wanted, strict=True))


def test_a_closure_and_what_has_no_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = offload(model)
    unused = model[1].weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model[0](torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    assert optimizer.step(closure).requires_grad
    assert torch.equal(model[1].weight, unused)
    assert not torch.equal(model[0].weight, before)
    assert len(optimizer.state) == 2 and model[0].weight in optimizer.state


def gpu_bytes(given, steps=2):
    """Bytes on the GPU after some steps, the peak, and the trace."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to("cuda")
        optimizer = adamw(model.parameters()) if given is None else offload(model, **given)
        for _ in range(steps):
            model(torch.zeros(1, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        left = gpu.allocated_bytes
    return left, gpu.report().peak.allocated_bytes, gpu.trace, gpu.report()


WEIGHTS = 8 * 1024 * 1024 * 4


def test_the_gpu_holds_no_state():
    plain, with_grads, without = gpu_bytes(None), gpu_bytes({}), gpu_bytes({"offload_gradients": True})
    assert plain[0] - with_grads[0] == 2 * WEIGHTS
    # Of the gradients one is there at a time.
    assert with_grads[1] - without[1] >= WEIGHTS * 6 // 8
    # The host has twins, both states and the gradients.
    assert with_grads[3].host_peak_bytes >= 4 * WEIGHTS
    # A step within a step is one.
    steps = [p.step for p in with_grads[2].phases if p.kind is PhaseKind.OPTIMIZER_STEP]
    assert steps == [p.step for p in plain[2].phases if p.kind is PhaseKind.OPTIMIZER_STEP] == [1, 2]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_fused(kind):
    model = models.llama()
    twin = copy.deepcopy(model)
    wanted = run(model, kind(model.parameters(), lr=1e-2))
    applied = memprof.apply(twin, "fused-optimizer", optimizer=lambda parameters: kind(parameters, lr=1e-2))
    optimizer = applied.results["fused-optimizer"]
    assert all(group["fused"] and not group["foreach"] for group in optimizer.param_groups)
    torch.testing.assert_close(run(twin, optimizer), wanted, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_is_there_becomes_fused_and_back():
    model = models.llama()
    optimizer = adamw(model.parameters())
    run(model, optimizer, steps=1)
    before = {key: optimizer.param_groups[0][key] for key in ("fused", "foreach")}
    applied = memprof.apply(model, "fused-optimizer", optimizer=optimizer)
    assert applied.results["fused-optimizer"] is optimizer
    run(model, optimizer, steps=1)
    with pytest.raises(UsageError, match="already on"):
        memprof.apply(model, "fused-optimizer", optimizer=optimizer)
    applied.undo()
    assert {key: optimizer.param_groups[0][key] for key in before} == before
    assert "_step_supports_amp_scaling" not in vars(optimizer)


def test_a_fused_step_makes_no_temporaries():
    def peak(fused):
        with memprof.virtual_gpu("h100-80gb"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to("cuda")
            optimizer = adamw(model.parameters())
            for step in range(3):
                if fused and step == 1:  # with state already there
                    memprof.apply(model, "fused-optimizer", optimizer=optimizer)
                if step == 2:
                    torch.cuda.reset_peak_memory_stats()
                model(torch.zeros(1, 1024, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if fused:
                assert all(state["step"].is_cuda for state in optimizer.state.values())
            return torch.cuda.max_memory_allocated()

    assert peak(False) - peak(True) >= WEIGHTS * 7 // 8


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("fused-optimizer", {"optimizer": lambda p: torch.optim.RMSprop(p)}, "no fused implementation"),
        ("fused-optimizer", {"optimizer": "adamw"}, "must make a torch optimizer"),
        ("fused-optimizer", {"optimizer": lambda p: torch.optim.Adam(p, differentiable=True)}, "differentiable"),
        ("cpu-offload-optimizer", {"optimizer": len}, "must make a torch optimizer"),
        ("cpu-offload-optimizer", {"optimizer": lambda p: torch.optim.SGD(p[:1])}, "parameters that it is given"),
        ("fused-optimizer,cpu-offload-optimizer", {}, "do not go together"),
        ("cpu-offload-optimizer,optimizer-in-backward", {"optimizer": adamw}, "do not go together"),
    ],
)
def test_wrong_use(name, given, problem):
    model = models.llama()
    before = models.state(model)
    with pytest.raises(UsageError) as raised:
        memprof.apply(model, name, **given)
    assert problem in str(raised.value)
    assert models.state(model) == before


def test_nothing_is_trained():
    model = models.llama().requires_grad_(False)
    for name in ("fused-optimizer", "cpu-offload-optimizer"):
        with pytest.raises(UsageError, match="nothing is trained"):
            memprof.apply(model, name)


def test_no_further_parameters():
    optimizer = offload(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no further parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
