"""Where a module stands in the table, by its path below another's."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import BertConfig, BertModel

from memprof.trace.events import NONE, ModuleRole
from memprof.watch.modules import ModuleTracker


def test_a_path_is_that_of_the_model_it_is_asked_below_also_when_another_came_later() -> None:
    tracker = ModuleTracker()
    models = [nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())) for _ in range(2)]
    for first, model in zip((0, 4), models, strict=True):
        tracker.add_root(model)
        assert [tracker.table[first + place].path for place in range(4)] == ["", "0", "1", "1.0"]
        assert [tracker.find_innermost_module(first, path) for path in ("0", "1", "1.0", "")] == [
            first + 1,
            first + 2,
            first + 3,
            first,
        ]
    assert [
        tracker.find_innermost_module(0, "1.0"),
        tracker.find_innermost_module(NONE, "1.0"),
        tracker.find_innermost_module(4, "1.0"),
    ] == [3, 3, 7]
    assert tracker.find_innermost_module(2, "0") == 3
    # What is not in the table is where the innermost around it is.
    assert [tracker.find_innermost_module(4, "1.0.weight"), tracker.find_innermost_module(4, "nowhere")] == [7, 4]


@pytest.mark.parametrize("width", [64, 128])
def test_a_pooler_as_wide_as_there_are_positions_is_no_head(width: int) -> None:
    tracker = ModuleTracker()
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tracker.add_root(BertModel(BertConfig(**shape, max_position_embeddings=128, vocab_size=1000)))
    assert not [module.path for module in tracker.table if module.role is ModuleRole.HEAD]


def test_a_linear_with_an_output_for_each_word_is_the_head() -> None:
    tracker = ModuleTracker()
    parts = {"words": nn.Embedding(1000, 64), "places": nn.Embedding(64, 64), "out": nn.Linear(64, 1000)}
    tracker.add_root(nn.ModuleDict({"parts": nn.ModuleDict(parts), "pooler": nn.Linear(64, 64)}))
    assert [module.path for module in tracker.table if module.role is ModuleRole.HEAD] == ["parts.out"]


def test_parameters_are_of_their_module_also_beside_one_that_is_none() -> None:
    tracker, layer = ModuleTracker(), nn.Linear(2, 2, bias=False)
    tracker.add_root(nn.Sequential(nn.ReLU(), layer))
    assert [tracker.find_parameter_module(one) for one in (layer.weight, nn.Linear(2, 2).weight)] == [2, NONE]
