"""Batches of lengths that vary, against allocators and runs of their own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.spec import MANY_STEPS, Mode, TargetSpec
from tests.unit.workload.test_modes import TINY

LENGTHS = (700, 80, 900, 300, 40, 1000, 640, 200)


pytestmark = pytest.mark.slow


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "vocab_size": 32000, "max_position_embeddings": 1024}))
    file = tmp_path / "lengths"
    file.write_text(" ".join(map(str, LENGTHS)))
    return TargetSpec(model=str(config), lengths=str(file), steps=len(LENGTHS))


def document(spec: TargetSpec) -> Report:
    return profile(spec)[1]


def test_each_step_takes_what_its_length_takes(spec: TargetSpec) -> None:
    found = document(spec).batches
    assert found is not None and found.longest == 1000 and found.mean_length == sum(LENGTHS) / len(LENGTHS)
    assert sorted(step.sequence_length for step in found.steps) == sorted(LENGTHS)
    for step in found.steps[1:4]:  # the first has no optimizer state yet
        alone = document(spec.edit(lengths=None, context_length=step.sequence_length, steps=2))
        # Beside a mask of 8 bytes a token: blocks that an earlier step left are given out whole where they are not
        # much too large, and count as allocated.
        assert step.peak_allocated_bytes == pytest.approx(alone.peak.allocated_bytes, rel=2e-3)


@pytest.mark.nightly
def test_reserved_memory_grows_until_it_settles(spec: TargetSpec) -> None:
    whole = document(spec)
    found = whole.batches
    assert found is not None
    assert all(before.reserved_bytes <= after.reserved_bytes for before, after in pairwise(found.steps))
    as_it_is, expandable, emptied = found.reserved
    assert as_it_is.peak_bytes == whole.peak.reserved_bytes == found.steps[-1].reserved_bytes
    assert found.steps[as_it_is.settled_step - 2].reserved_bytes < as_it_is.peak_bytes
    assert found.steps[as_it_is.settled_step - 1].reserved_bytes == as_it_is.peak_bytes
    for row in found.reserved:
        assert row.mean_bytes <= row.p99_bytes <= row.peak_bytes
    assert expandable.peak_bytes == document(spec.edit(alloc_conf="expandable_segments:True")).peak.reserved_bytes
    assert emptied.mean_bytes < as_it_is.mean_bytes
    highest = 0
    for step in found.steps:
        highest = max(highest, step.peak_allocated_bytes)
        assert step.unused_bytes == step.reserved_bytes - highest


def test_padding_and_accumulation(spec: TargetSpec) -> None:
    found = document(spec.edit(batch_size=2, gradient_accumulation=2, steps=2, lengths=f"{spec.lengths},multiple=128"))
    assert found.batches is not None and found.target is not None and len(found.target.sequence_lengths) == 4
    assert all(length % 128 == 0 for length in found.target.sequence_lengths)
    first = max(found.target.sequence_lengths[:2])
    assert found.batches.steps[0].sequence_length == first


def test_batches_of_an_evaluation_count_with_their_step(spec: TargetSpec) -> None:
    found = document(spec.edit(evaluate=True, steps=2))
    assert found.batches is not None and found.target is not None and len(found.target.sequence_lengths) == 4
    assert found.batches.steps[1].sequence_length == max(found.target.sequence_lengths[2:])


def test_inference_too(spec: TargetSpec) -> None:
    found = document(spec.edit(mode=Mode.INFERENCE)).batches
    assert found is not None and [step.step for step in found.steps] == list(range(1, len(LENGTHS) + 1))


def test_the_report_says_so_and_comes_back(spec: TargetSpec) -> None:
    whole = document(spec)
    assert Report.from_json(json.loads(json.dumps(whole.to_json()))).batches == whole.batches
    text = " ".join(to_text(render(whole)).split())
    assert "batch 1 x up to 1,000 tokens" in text and "Over 8 steps with lengths" in text
    assert whole.frames()["batches"]["sequence_length"].max() == 1000
    assert list(whole.frames()["reserved"]["how"]) == [row.how for row in whole.batches.reserved]  # type: ignore[union-attr]


def test_without_lengths_there_are_none(spec: TargetSpec) -> None:
    plain = document(spec.edit(lengths=None, context_length=64, steps=2))
    assert plain.batches is None and plain.frames()["batches"].empty
    assert TargetSpec(model="gpt2").steps == 2 and TargetSpec(model="gpt2", lengths="x").steps == MANY_STEPS


def test_what_does_not_go_with_it_is_refused(spec: TargetSpec) -> None:
    with pytest.raises(UsageError, match="all of one length"):
        spec.edit(dataset_batches=3)
    with pytest.raises(UsageError, match="fed tokens"):
        profile(spec.edit(model="vit-base"))
