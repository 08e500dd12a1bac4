"""Whether a stack is given what hangs on a leaf, told without looking through a graph that would be freed otherwise."""

import pytest
import torch
from torch import nn

from memprof.virtual.repeat import RunAgain, leaves


def made_of(leaf):
    """What embeddings make of it, and of positions that are not trained."""
    return leaf * 2 + torch.ones(3)


def test_no_graph_is_looked_through_where_a_leaf_is_all_that_it_can_come_from(monkeypatch):
    monkeypatch.setattr(leaves, "_graph", lambda tensor: pytest.fail("looked through"))
    leaf = torch.ones(3, requires_grad=True)
    assert leaves.ends_in_leaf(leaf, lambda: True)
    assert leaves.ends_in_leaf(made_of(leaf), lambda: False)
    assert not leaves.ends_in_leaf(nn.Parameter(torch.ones(3)), lambda: False)


def test_parameters_are_held_by_their_model():
    assert not leaves.ends_in_leaf(made_of(nn.Parameter(torch.ones(3))), lambda: True)


def test_a_leaf_beside_trained_parameters_has_all_layers_run():
    both = made_of(torch.ones(3, requires_grad=True)) + nn.Parameter(torch.ones(3))
    with pytest.raises(RunAgain):
        leaves.ends_in_leaf(both, lambda: True)
