"""The history of LBFGS, which decides what it takes, is as long as that of a run which has not converged."""

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import Role
from memprof.virtual import VirtualGpu


def train(device: str, **options: object) -> list[tuple[int, int, int]]:
    """The pairs of directions, iterations and evaluations after each of three steps."""
    model, rows = nn.Linear(64, 64).to(device), torch.randn(8, 64, device=device)
    optimizer = torch.optim.LBFGS(model.parameters(), **options)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        return loss

    found = []
    for _ in range(3):
        optimizer.step(evaluate)
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        found.append((len(state["old_dirs"]), state["n_iter"], state["func_evals"]))
    assert optimizer.param_groups[0]["tolerance_change"] == 1e-9
    return found


# 20 iterations a step, all but the run's first with a pair; at most 25 evaluations, of which a line search takes two.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"history_size": 30}, [(19, 20, 20), (30, 40, 40), (30, 60, 60)]),
        ({"max_iter": 3}, [(1, 2, 3), (3, 4, 6), (5, 6, 9)]),  # three evaluations are its most
        ({"line_search_fn": "strong_wolfe"}, [(11, 12, 25), (23, 24, 50), (35, 36, 75)]),
    ],
)
def test_every_iteration_is_recorded(options: dict[str, object], expected: list[tuple[int, int, int]]) -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        assert train("cuda", **options) == expected
    assert any("LBFGS" in said for said in gpu.trace.assumptions)


def test_on_the_host_it_converges_as_it_does() -> None:
    torch.manual_seed(0)
    alone = train("cpu")
    torch.manual_seed(0)
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        assert train("cpu") == alone
    assert alone[-1][1] < 60  # it converges: values decide
    assert not any("LBFGS" in said for said in gpu.trace.assumptions)


def test_the_history_of_a_step_that_memory_ends_is_of_the_optimizer() -> None:
    """The tenth evaluation runs out: there are pairs of all iterations but the first."""
    calls = [0]
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        parameter = nn.Parameter(torch.randn(1 << 20, device="cuda"))
        optimizer = torch.optim.LBFGS([parameter])

        def evaluate() -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 10:
                raise torch.OutOfMemoryError
            optimizer.zero_grad()
            loss = parameter.square().mean()
            loss.backward()
            return loss

        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(evaluate)
    names = [owner.name for owner in gpu.trace.owners.values() if owner.role is Role.OPTIMIZER_STATE]
    assert (names.count("old_dirs"), names.count("old_stps")) == (8, 8)
    assert "old_dirs" not in optimizer.state[parameter]
