"""Lines of a program's own files that lead to an allocation whose line is a library's, or in a function torch calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.trace.events import Trace
from memprof.virtual import VirtualGpu

WIDTH = 1024  # a square matrix of float32 has 4 MiB

LIBRARY = """
import torch
def double(x):
    return x * 2
def call(function, *arguments):
    return function(*arguments)
class Twice(torch.nn.Module):
    def forward(self, x):
        return double(x)
"""


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as active:
        yield active


@pytest.fixture(scope="module")
def library() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "lib"}
    exec(compile(LIBRARY, "/venv/lib/python3/site-packages/lib.py", "exec"), names)
    return names


def make_matrix(side: int = WIDTH) -> torch.Tensor:
    return torch.empty(side, side, device="cuda")


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


class Net(nn.Module):
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor] = square) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def find_callers(trace: Trace, op: str) -> list[tuple[str, str]]:
    """Return function and name of the callers of the last storage that `op` allocated; all are in this file."""
    index = max(index for index, storage in enumerate(trace.storages) if trace.op(storage) == op)
    callers = trace.list_callers(index)
    assert all(Path(trace.sources[c.source].rpartition(":")[0]) == Path(__file__) for c in callers)
    return [(trace.sources[c.source].rpartition(" ")[2], c.by) for c in callers]


def test_own_line_has_no_callers(gpu: VirtualGpu) -> None:
    square(make_matrix())
    assert find_callers(gpu.trace, "aten.mul") == []


def test_a_library_is_called(gpu: VirtualGpu, library: dict[str, Any]) -> None:
    def use() -> Any:
        return library["double"](make_matrix())

    use()
    assert find_callers(gpu.trace, "aten.mul") == [("use", "")]


def test_small_storages_have_none(gpu: VirtualGpu, library: dict[str, Any]) -> None:
    library["double"](make_matrix(16))
    assert find_callers(gpu.trace, "aten.mul") == []


def test_a_small_storage_that_does_not_fit_has_some(gpu: VirtualGpu, library: dict[str, Any]) -> None:
    gpu.recorder.storages.find_oom_message = lambda device: "full" if len(gpu.recorder.trace.storages) > 1 else None
    x = make_matrix(16)

    def use() -> Any:
        return library["double"](x)

    with pytest.raises(torch.OutOfMemoryError):
        use()
    assert find_callers(gpu.trace, "aten.mul") == [("use", "")]


@pytest.mark.parametrize("model", [Net(), nn.Sequential(nn.Identity(), Net(Net()))], ids=["one", "nested"])
def test_a_model_is_called(gpu: VirtualGpu, model: nn.Module) -> None:
    def train() -> Any:
        return model(make_matrix())

    train()
    assert find_callers(gpu.trace, "aten.mul") == [("train", "")]


def test_a_library_is_called_in_a_model(gpu: VirtualGpu, library: dict[str, Any]) -> None:
    def train() -> Any:
        return Net(library["Twice"]())(make_matrix())

    train()
    assert find_callers(gpu.trace, "aten.mul") == [("forward", ""), ("train", "")]


def test_a_library_trains_the_model(gpu: VirtualGpu, library: dict[str, Any]) -> None:
    def train() -> Any:
        return library["call"](Net(), make_matrix())

    train()
    assert find_callers(gpu.trace, "aten.mul") == [("train", "")]


@pytest.mark.parametrize(
    ("differentiate", "name"),
    [
        (lambda x: vmap(square)(x), "torch.func.vmap"),
        (lambda x: vmap(grad(lambda row: square(row).sum()))(x), "torch.func.vmap"),
        (lambda x: grad(lambda y: square(y).sum())(x), "torch.func.grad"),
        (lambda x: jacrev(lambda y: square(y)[0, :2])(x), "torch.func.jacrev"),
        (lambda x: jacfwd(lambda y: square(x + y))(x[0, 0]), "torch.func.jacfwd"),
        (lambda x: functional_call(Net(), {}, x), "torch.func.functional_call"),
        (lambda x: checkpoint(square, x, use_reentrant=False), ""),
    ],
)
def test_a_transform_is_called(
    gpu: VirtualGpu, differentiate: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    differentiate(make_matrix())
    assert find_callers(gpu.trace, "aten.mul") == [("<lambda>", name)]


def test_a_backward_is_called(gpu: VirtualGpu) -> None:
    x = make_matrix().requires_grad_()

    def train() -> None:
        loss = square(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]

    train()
    assert find_callers(gpu.trace, "aten.mul") == [("train", "torch.Tensor.backward")]
