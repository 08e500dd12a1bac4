"""What a model without a head tells apart: as many as its largest table has rows, or as its loss is taken over."""

import pytest

from memprof.ledger.stages import find_vocabulary_size
from memprof.trace.events import ModuleRole
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(("weights", "words"), [(1, 512), (2, 100)])
def test_a_table_with_as_many_rows_as_the_model_is_wide_has_none(weights: int, words: int) -> None:
    b = TraceBuilder()
    for name, rows in (("places", 512), ("classes", 100)):
        b.enter(name, "Embedding", ModuleRole.EMBEDDING)
        b.parameter(f"{name}.weight", rows, 64)
        b.leave()
    for number in range(weights):
        b.parameter(f"blocks.{number}.weight", 2048, 512)
    assert find_vocabulary_size(b.trace) == words


@pytest.mark.parametrize(("weights", "words"), [(1, 256), (2, 10)])
def test_a_loss_over_as_many_as_the_model_is_wide_tells_none(weights: int, words: int) -> None:
    b = TraceBuilder()
    for number in range(weights):
        b.parameter(f"blocks.{number}.weight", 1024, 256)
    b.inputs(1, 64)
    for classes in (10, 256):
        b.new(64, classes, op="aten._log_softmax")
    assert find_vocabulary_size(b.trace) == words
