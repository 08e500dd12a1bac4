"""What a rank of a plan has of a small decoder, in elements that are counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.errors import UsageError
from memprof.estimate.ranks import SINGLE_GPU, Elements, Rank, build_rank, list_ranks
from memprof.workload.plan import parse_plan
from tests.unit.estimate.tiny import COUNT, TINY, plan, tiny_model

TABLE = 1000 * 64
LAYER = 49_152 + 2 * 64
NORMS_HALVED = 49_152 // 2 + 2 * 64
TIED = dataclasses.replace(TINY, tied=True)


@pytest.mark.parametrize(
    ("geometry", "text", "gpus", "expected"),
    [
        (TINY, "ddp", 1, [Elements(LAYER, 3, TABLE, TABLE, 64, 0)]),
        (TIED, "fsdp", 2, [Elements(LAYER, 3, TABLE, 0, 64, 0)]),
        (TINY, "pp", 2, [Elements(LAYER, 2, TABLE, 0, 0, 0), Elements(LAYER, 1, 0, TABLE, 64, 0)]),
        # A tied table is on the first stage and on the last, and on each of the ranks that divide it.
        (TIED, "pp", 2, [Elements(LAYER, 2, TABLE, 0, 0, 0), Elements(LAYER, 1, 0, TABLE, 64, 0)]),
        (TIED, "tp", 2, [Elements(NORMS_HALVED, 3, TABLE // 2, TABLE // 2, 64, TABLE // 2)]),
        (
            dataclasses.replace(TINY, norm="layer", num_positions=10, has_head_bias=True), "tp", 2,
            [Elements(49_152 // 2 + 4 * 64, 3, TABLE // 2 + 640, TABLE // 2 + 1000, 128, TABLE // 2)],
        ),
        (TINY, "pp", 3, [Elements(LAYER, 1, TABLE, 0, 0, 0), Elements(LAYER, 1, 0, 0, 0, 0),
                         Elements(LAYER, 1, 0, TABLE, 64, 0)]),
    ],
)  # fmt: skip
def test_first_stage_has_the_embedding_and_last_the_head(geometry, text, gpus, expected) -> None:
    spread = parse_plan(text, gpus)
    assert [build_rank(spread, stage).count_elements(geometry) for stage in range(spread.stages)] == expected
    if geometry is TINY:
        assert sum(part.total for part in expected) == COUNT


def test_the_root_is_what_is_outside_of_layers() -> None:
    elements = Elements(layer=100, num_layers=3, embedding=10, head=20, final_norm=5, undivided=7)
    assert (elements.root, elements.total) == (35, 335)


def test_a_remainder_of_layers_goes_to_the_first_stages() -> None:
    deep = dataclasses.replace(TINY, layers=11)
    assert [Rank(stages=4, stage=stage).count_layers(deep) for stage in range(4)] == [3, 3, 3, 2]


def test_tensor_parallel_ranks_share_heads_and_intermediate_size() -> None:
    assert SINGLE_GPU.shard_geometry(TINY) is TINY
    assert Rank(tensor=2).shard_geometry(TINY) == dataclasses.replace(TINY, heads=2, kv_heads=1, intermediate=96)


@pytest.mark.parametrize(
    ("text", "gpus", "stage", "rank"),
    [
        ("ddp", 4, 0, Rank(replicas=4)),
        ("fsdp", 4, 0, Rank(4, 4, 4, replicas=4, gathers=True)),
        ("fsdp:shard_grad_op", 4, 0, Rank(4, 4, 4, replicas=4, gathers=True, reshard=False)),
        ("hsdp:2x3", 6, 0, Rank(3, 3, 3, replicas=6, gathers=True)),
        ("cp=2,fsdp=3", 6, 0, Rank(6, 6, 6, replicas=6, gathers=True, context=2)),
        ("ulysses=2,ddp=3", 6, 0, Rank(replicas=6, ulysses=2)),
        ("tp=2,fsdp=3", 6, 0, Rank(3, 3, 3, replicas=3, gathers=True, tensor=2)),
        # A stage of 1F1B has as many micro-batches in flight as stages from it on.
        ("pp=4:microbatches=5", 4, 0, Rank(stages=4, stage=0, in_flight=4, microbatches=5)),
        ("pp=4:microbatches=5", 4, 3, Rank(stages=4, stage=3, in_flight=1, microbatches=5)),
        ("pp=4:gpipe:microbatches=5", 4, 3, Rank(stages=4, stage=3, in_flight=5, microbatches=5)),
        ("pp=4:gpipe:microbatches=3", 4, 0, Rank(stages=4, stage=0, in_flight=3, microbatches=3)),
        ("pp=2:microbatches=2", 2, 0, Rank(stages=2, stage=0, in_flight=2, microbatches=2)),
        (
            "pp=4:microbatches=4,fsdp=2",
            8,
            1,
            Rank(2, 2, 2, replicas=2, gathers=True, stages=4, stage=1, in_flight=3, microbatches=4),
        ),
    ],
)
def test_a_rank_of_a_plan(text: str, gpus: int, stage: int, rank: Rank) -> None:
    found = build_rank(parse_plan(text, gpus), stage)
    assert found == rank
    assert (found.is_first, found.is_last) == (stage == 0, stage == rank.stages - 1)
    assert found.sequence == rank.context * rank.ulysses


def test_each_stage_has_one_rank() -> None:
    model = dataclasses.replace(tiny_model(), config={"num_attention_heads": 4, "num_hidden_layers": 3})
    assert list_ranks(model, plan("full"), "", 1) == [SINGLE_GPU]
    assert [rank.stage for rank in list_ranks(model, plan("full"), "pp=3", 3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "column", "text", "problem"),
    [
        ("inference", "bfloat16", "device-map", "no layers over GPUs"),
        ("inference", "bfloat16", "pp", "a pipeline trains"),
        ("lora", "bfloat16", "tp", "lora beside tp"),
        ("lora", "int4", "fsdp", "quantized weights are not spread"),
    ],
)
def test_a_plan_that_a_method_does_not_have(method: str, column: str, text: str, problem: str) -> None:
    model = dataclasses.replace(tiny_model(), config={"num_attention_heads": 4, "num_hidden_layers": 3})
    with pytest.raises(UsageError, match=problem) as refused:
        list_ranks(model, plan(method, column), text, 2)
    assert refused.value.value == f"--parallel {text}"


@pytest.mark.parametrize(("text", "is_whole"), [("fsdp", True), ("cp", True), ("tp", False), ("pp", False)])
def test_a_chunked_loss_needs_a_whole_head(text: str, is_whole: bool) -> None:
    model = dataclasses.replace(
        tiny_model(), config={"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    )
    if is_whole:
        assert list_ranks(model, plan("full", chunked_loss=True), text, 2)
        return
    with pytest.raises(UsageError, match=rf"chunked loss needs a head .*\n  value: --parallel {text}"):
        list_ranks(model, plan("full", chunked_loss=True), text, 2)
