"""The trainers of transformers, PEFT and TRL, with evaluation, generation and checkpoints, run unmodified."""

from __future__ import annotations

import pytest

from tests.lanes import by_day
from tests.scripts.running import check_sound, run_twice, stages

TRAINERS = {
    "trainer": ("--workers", "2"),
    "seq2seq": (),
    "lora": ("--merge",),
    "sft": ("--packing", "--lora"),
    "dpo": (),
}
BESIDE = {
    "trainer": {"evaluation", "checkpoint", "logits", "optimizer step"},
    "seq2seq": {"evaluation", "decode", "logits", "optimizer step"},
    "lora": {"checkpoint", "decode", "logits", "optimizer step"},
    "sft": {"evaluation", "optimizer step"},
    "dpo": {"evaluation", "checkpoint", "optimizer step"},
}


@pytest.mark.parametrize("name", by_day(TRAINERS, "sft"))
def test_it_runs(name, tmp_path):
    found = run_twice(name, *TRAINERS[name], folder=tmp_path)
    # More steps where each left more behind than the one before: then all four.
    for way, (ended, steps) in {"stopped": ("steps exit", (2, 3, 4)), "to the end": ("exit", (4,))}.items():
        report = found[way]["report"]
        assert found[way]["exit_code"] == 0, found["stderr"][-3000:]
        check_sound(report)
        told = report["program"]
        assert told["ended"] in ended.split() and told["exit_code"] == 0 and told["steps"] in steps
        assert {"backward", "loss"} <= stages(report, 2)
    assert BESIDE[name] <= stages(found["to the end"]["report"])
