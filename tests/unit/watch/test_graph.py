"""The autograd graph of tensors, and of views that have lost theirs."""

from __future__ import annotations

import warnings

import pytest
import torch

import memprof
from memprof.watch.cycles import find_cycle
from memprof.watch.graph import collect_nodes, find_node, is_leaf
from tests.unit.full_gpu import run_out_of_memory


def make_lost_view(device: str = "cpu") -> torch.Tensor:
    """Return one of two views that `unbind` made of a tensor that is modified since."""
    base = torch.ones(2, 4, requires_grad=True, device=device) * 1
    view, _ = base.unbind(0)
    base.add_(1)
    return view


def test_a_view_that_has_lost_its_node() -> None:
    view = make_lost_view()
    with pytest.raises(RuntimeError, match="modified inplace"):
        view.grad_fn  # noqa: B018
    assert find_node(view) is None
    assert not is_leaf(view)
    assert collect_nodes([view], 10) == []


def test_other_tensors() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 1
    assert (find_node(leaf), is_leaf(leaf)) == (None, True)
    assert (find_node(result), is_leaf(result)) == (result.grad_fn, False)


def test_memory_runs_out_beside_such_a_view() -> None:
    def program() -> None:
        model = torch.nn.Linear(4, 4).cuda()
        torch.optim.SGD(model.parameters())
        view = make_lost_view("cuda")  # noqa: F841  kept until the failure
        model(torch.ones(1, 4, device="cuda"))
        torch.zeros(1 << 30, device="cuda")

    run_out_of_memory(program, 1 << 30)


def test_a_cycle_is_sought_beside_such_a_view() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_cycle([make_lost_view()], []) is None


def test_autocast_casts_such_a_view_where_gradients_are_off() -> None:
    with memprof.virtual_gpu("h100-80gb"):
        view = make_lost_view("cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert (view[None] @ torch.ones(4, 1, device="cuda")).dtype is torch.bfloat16
