"""What a model of the user's own is fed with, and what is said of it."""

from __future__ import annotations

import pytest
from torch import nn

from memprof.workload.inputs import Feeder
from memprof.workload.models import ModelSource


@pytest.mark.parametrize(
    ("first", "name", "shape", "tokens"),
    [
        (nn.Conv2d(3, 8, 3), "input", (2, 3, 224, 224), False),
        (nn.Embedding(100, 8), "input", (2, 2048), True),
        (nn.Linear(16, 8), "input", (2, 2048, 16), True),
    ],
)
def test_images_have_no_context_length(first: nn.Module, name: str, shape: tuple[int, ...], tokens: bool) -> None:
    source = ModelSource("model.py:build", "custom", lambda: first, None, None, None, None)
    feeder = Feeder(source, first, 2, None)
    assert feeder.host_batch()[name].shape == shape
    assert feeder.takes_tokens is tokens
    assert any(sentence.startswith("Context length") for sentence in feeder.assumptions) is tokens
