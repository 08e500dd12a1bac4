"""Where a module stands in the table, by its path below another's."""

from __future__ import annotations

from torch import nn

from memprof.trace.events import NONE
from memprof.watch.modules import ModuleTracker


def test_a_path_is_that_of_the_model_it_is_asked_below_also_when_another_came_later() -> None:
    tracker = ModuleTracker()
    models = [nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())) for _ in range(2)]
    for first, model in zip((0, 4), models, strict=True):
        tracker.add_root(model)
        assert [tracker.table[first + place].path for place in range(4)] == ["", "0", "1", "1.0"]
        assert [tracker.below(first, path) for path in ("0", "1", "1.0", "")] == [
            first + 1,
            first + 2,
            first + 3,
            first,
        ]
    assert [tracker.below(0, "1.0"), tracker.below(NONE, "1.0"), tracker.below(4, "1.0")] == [3, 3, 7]
    assert tracker.below(2, "0") == 3
    # What is not in the table is where the innermost around it is.
    assert [tracker.below(4, "1.0.weight"), tracker.below(4, "nowhere")] == [7, 4]
