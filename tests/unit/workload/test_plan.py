"""Plans: what `--parallel` says, and what a model cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.workload.plan import ParallelPlan, check_plan, parse_plan

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("text", "gpus", "plan"),
    [
        ("ddp", 4, ParallelPlan(replicate=4)),
        ("fsdp", 8, ParallelPlan(shard=8, sharded=True)),
        ("FSDP:shard_grad_op", 2, ParallelPlan(shard=2, sharded=True, reshard=False)),
        ("hsdp:2x4", 8, ParallelPlan(replicate=2, shard=4, sharded=True)),
        ("hsdp=2x4:shard_grad_op", 8, ParallelPlan(replicate=2, shard=4, sharded=True, reshard=False)),
        ("tp=2,fsdp=4", 8, ParallelPlan(tensor=2, shard=4, sharded=True)),
        ("tp=2, fsdp", 16, ParallelPlan(tensor=2, shard=8, sharded=True)),
        ("cp", 2, ParallelPlan(context=2)),
        ("ulysses=2,ddp", 4, ParallelPlan(ulysses=2, replicate=2)),
        ("pp=4:1f1b:microbatches=8", 4, ParallelPlan(stages=4, microbatches=8)),
        ("pp:gpipe,fsdp=2", 4, ParallelPlan(stages=2, shard=2, sharded=True, schedule="gpipe", microbatches=4)),
        ("fsdp", 1, ParallelPlan(sharded=True)),
    ],
)
def test_what_a_plan_says(text, gpus, plan):
    found = parse_plan(text, gpus)
    assert found == plan and found.size == gpus


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [
        ("zero", 2, "unknown part"),
        ("fsdb", 2, "did you mean fsdp"),
        ("fsdp,ddp", 2, "exclude each other"),
        ("cp=2,ulysses=2", 4, "exclude each other"),
        ("fsdp,fsdp", 2, "given twice"),
        ("tp=2", 8, "--gpus 2, or --parallel tp=2,fsdp=4"),
        ("tp=3", 8, "--gpus 3"),
        ("ddp=2", 4, "--gpus 2"),
        ("tp,fsdp", 4, "without a number"),
        ("tp=x", 4, "not a number of ranks"),
        ("tp=0", 4, "not a number of ranks"),
        ("hsdp", 4, "hsdp:2x4 are two replicas of four shards"),
        ("hsdp=2", 4, "hsdp:2x4 are two replicas of four shards"),
        ("pp=4:microbatches=2", 4, "microbatches=4, or gpipe"),
        ("pp=4:zero-bubble", 4, "no such option"),
        ("tp=4:1f1b", 4, "leave it out"),
        ("", 4, "unknown part"),
        ("tp=9999999999999999999999", 4, "not a number of ranks"),
    ],
)
def test_what_is_no_plan(text, gpus, said):
    with pytest.raises(UsageError) as error:
        parse_plan(text, gpus)
    assert said in f"{error.value} {error.value.value} {error.value.hint}"


@given(st.text("adfhpstucrx=:,0123456789", max_size=30), st.integers(1, 64))
def test_any_text_is_a_plan_or_an_error(text, gpus):
    try:
        plan = parse_plan(text, gpus)
    except UsageError:
        return
    assert plan.size == gpus


def test_one_rank_of_each_kind():
    assert ParallelPlan(shard=4).group_similar_ranks() == [(0, range(4))]
    assert ParallelPlan(context=4).group_similar_ranks() == [(3, range(4))]
    assert ParallelPlan(stages=2, shard=2).group_similar_ranks() == [(0, range(2)), (2, range(2, 4))]


@pytest.mark.parametrize(
    ("plan", "more", "said"),
    [
        ("tp=8", {}, "tp=4 can be"),
        ("ulysses=8", {}, "ulysses=6 can be"),
        ("pp=8", {}, "pp=6 can be"),
        ("tp=2,ddp=4", {}, "tp=2,fsdp=4"),
        ("pp=2,ddp=4", {"mode": "inference"}, "a pipeline trains"),
        ("fsdp", {"quantize": "nf4", "adapter": "lora"}, "leave out --quantize"),
        ("tp=2,fsdp=4", {"adapter": "lora"}, "lora beside tp"),
        ("pp=2,fsdp=4", {"npt": "low-rank"}, "NPT beside pp"),
        ("ulysses=2,fsdp=4", {"lengths": "alpaca"}, "leave out --lengths"),
    ],
)
def test_what_a_model_cannot_be(plan, more, said):
    spec = TargetSpec(model="a/model", gpus=8, parallel=plan, **more)
    with pytest.raises(UsageError) as error:
        check_plan(parse_plan(plan, 8), spec, "causal-lm", HEADS)
    assert said in f"{error.value} {error.value.hint}"


def test_a_model_that_is_no_language_model():
    spec = TargetSpec(model="a/model", gpus=2, parallel="tp=2")
    with pytest.raises(UsageError, match="tp is for causal language models"):
        check_plan(parse_plan("tp=2", 2), spec, "image-classification", HEADS)
    check_plan(parse_plan("fsdp", 2), TargetSpec(model="a/model", gpus=2, parallel="fsdp"), "custom", None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpus": 2, "parallel": "ddp", "rank": 2}, "no such rank"),
        ({"gpus": 2, "parallel": "ddp", "device": "cpu"}, "ranks are virtual ones"),
        ({"gpus": 0, "parallel": "ddp"}, "at least 1"),
    ],
)
def test_what_is_asked_beside_it(more, said):
    with pytest.raises(UsageError, match=said):
        TargetSpec(model="a/model", **more)
