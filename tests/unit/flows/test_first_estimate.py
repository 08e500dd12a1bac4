"""The first line's verdict leaves no doubt or says so, and of what the closed form does not know nothing is said."""

import dataclasses
import json

import pytest

from memprof.device.catalog import custom_gpu, find_gpu
from memprof.estimate.geometry import build_from_model
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import ALLOCATED, BORDERLINE, DEVICE_USED, FITS, NO, build_estimate
from memprof.flows.first_estimate import FirstEstimate, bound_cell, estimate_search, estimate_spec
from memprof.flows.recommend.plans import Goal
from memprof.flows.recommend.search import SearchRequest
from memprof.spec import TargetSpec
from memprof.units import GIB, format_rounded_gib

H100 = find_gpu("h100-80gb")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(8, 10, FITS), (8, 11, BORDERLINE), (10, 12, BORDERLINE), (11, 12, NO)],
)
def test_a_band_that_reaches_the_capacity_is_no_verdict(low, high, verdict):
    assert FirstEstimate(10, low, high, custom_gpu(10)).verdict == verdict


@pytest.mark.parametrize(
    ("estimate", "condition", "text"),
    [
        (FirstEstimate(1_052 * GIB, 900 * GIB, 1_200 * GIB, H100), "", "about 1,050 GiB, does not fit the h100-80gb"),
        (FirstEstimate(9 * GIB, 8 * GIB, 10 * GIB, H100), "without fixes", "about 9.0 GiB without fixes, fits the"),
        (FirstEstimate(79 * GIB, 70 * GIB, 90 * GIB, H100), "", "about 79 GiB, close to the limit of the h100-80gb"),
        (FirstEstimate(GIB, GIB, GIB, custom_gpu(8 * GIB)), "", "about 1.0 GiB, fits the custom GPU with 8.00 GiB"),
    ],
)
def test_in_words(estimate, condition, text):
    assert estimate.describe(condition).startswith(text)


@pytest.mark.parametrize(
    ("gib", "text"), [(1052, "1,050 GiB"), (99.6, "100 GiB"), (14.4, "14 GiB"), (9.94, "9.9 GiB"), (0.04, "0.0 GiB")]
)
def test_as_many_digits_as_it_is_worth(gib, text):
    assert format_rounded_gib(round(gib * GIB)) == text


@pytest.mark.parametrize(
    ("spec", "method", "dtype", "asked"),
    [
        ({}, "full", "bfloat16", {}),
        ({"dtype": "float32", "optimizer": "sgd"}, "full", "float32", {"optimizer": "sgd"}),
        ({"amp": "bfloat16"}, "mixed", "bfloat16", {}),
        ({"amp": "float16", "dtype": "float32"}, "mixed", "float16", {}),
        ({"optimizer": "adamw-8bit"}, "adamw-8bit", "bfloat16", {}),
        ({"adapter": "lora", "lora_rank": 32}, "lora", "bfloat16", {"lora_rank": 32}),
        ({"adapter": "lora", "quantize": "nf4", "amp": "bfloat16"}, "lora", "int4", {}),
        ({"activation_checkpointing": True, "batch_size": 4}, "full-checkpointing", "bfloat16", {"batch_size": 4}),
        ({"optimizer_impl": "fused", "context_length": 512}, "full", "bfloat16",
         {"optimizer_impl": "fused", "context_length": 512}),
        ({"fixes": ("chunked-loss",)}, "full", "bfloat16", {"chunked_loss": True}),
        ({"mode": "inference", "new_tokens": 7}, "inference", "bfloat16", {"new_tokens": 7}),
        ({"lengths": "lognormal:200,0.5", "batch_size": 2}, "full", "bfloat16",
         {"lengths": "lognormal:200,0.5", "batch_size": 2}),
    ],
)  # fmt: skip
def test_a_spec_is_the_cell_of_the_table(spec, method, dtype, asked):
    estimate = estimate_spec(TargetSpec(model="qwen3-0.6b", **spec))
    cell = build_estimate(build_from_model("qwen3-0.6b"), EstimateOptions(**asked)).cells[method, dtype]
    ranges = cell.compute_ranges(H100)
    num_bytes, _, high_bytes = ranges[DEVICE_USED]
    low_bytes = round(0.93 * ranges[ALLOCATED][0]) + H100.context_bytes
    assert estimate == FirstEstimate(num_bytes, low_bytes, high_bytes, H100)


UNKNOWN = [
        {"model": "bert-base-uncased"}, {"model": "nowhere.py:build"}, {"model": "nobody"}, {"model": "4B"},
        {"gpu": "t4"}, {"gpu": "nothing"}, {"gpus": 2}, {"gpus": 5, "parallel": "tp=5"}, {"steps": 1},
        {"attention": "eager"}, {"compile": True}, {"freeze": "*wte*"}, {"npt": "dense"}, {"vocab_size": 100},
        {"evaluate": True}, {"zero_grad": "zero"}, {"dataset_batches": 3}, {"optimizer": "adafactor"},
        {"optimizer_impl": "single"}, {"workspaces": False}, {"alloc_conf": "expandable_segments:True"},
        {"host_memory_bytes": GIB}, {"sdpa_backend": "math"}, {"fixes": ("freeze",)}, {"context_length": 10_000},
        {"fixes": ("chunked-loss=64",)}, {"mode": "inference"}, {"lengths": "alpaca", "steps": 20},
        {"adapter": "lora", "lora_dropout": 0.1}, {"adapter": "lora", "lora_targets": "nothing"},
        {"adapter": "lora", "quantize": "nf4"}, {"adapter": "lora", "quantize": "fp4", "amp": "bfloat16"},
        {"adapter": "lora", "quantize": "nf4", "amp": "bfloat16", "double_quant": False},
    ]  # fmt: skip


def test_nothing_is_said_of_what_it_does_not_know():
    for spec in UNKNOWN:
        assert estimate_spec(TargetSpec(**{"model": "gpt2", **spec})) is None


@pytest.mark.parametrize(("gpu", "is_known"), [("a100-80gb", False), ("rtx-4090", True), ("h100-80gb", True)])
def test_float8_is_dequantized_before_compute_capability_8_9(gpu, is_known):
    spec = TargetSpec(model="qwen3-0.6b", mode="inference", new_tokens=2, dtype="bfloat16", quantize="fp8", gpu=gpu)
    assert (estimate_spec(spec) is not None) == is_known


def test_nothing_is_said_of_stored_weights(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}  # fmt: skip
    spec = TargetSpec(model=str(tmp_path))
    for entry, is_known in (({}, True), ({"quantization_config": {"quant_method": "gptq"}}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | entry), encoding="utf-8")
        assert (estimate_spec(spec) is not None) == is_known


def test_gradients_of_earlier_micro_batches_are_there():
    plain = TargetSpec(model="gpt2", context_length=1024, batch_size=8)
    once, twice = estimate_spec(plain), estimate_spec(plain.edit(gradient_accumulation=2))
    # The peak is in the loss, before there are gradients: 124.4M of 4 bytes are added, less the 7% of the band.
    assert twice.low_bytes - once.low_bytes == pytest.approx(0.93 * 124_439_808 * 4, rel=0.01)


def test_ranks_are_estimated_with_a_plan():
    alone = estimate_spec(TargetSpec(model="qwen3-4b"))
    spread = estimate_spec(TargetSpec(model="qwen3-4b", gpus=8, parallel="fsdp"))
    assert spread.num_bytes < 0.6 * alone.num_bytes


def test_of_a_search_it_is_the_first_plan():
    spec = TargetSpec(model="qwen3-0.6b", context_length=1024)
    estimate, condition = estimate_search(spec, SearchRequest(Goal.FULL))
    options = EstimateOptions(context_length=1024, optimizer_impl="fused", chunked_loss=True)
    cell = build_estimate(build_from_model("qwen3-0.6b"), options).cells["mixed-checkpointing", "bfloat16"]
    assert estimate == bound_cell(cell, H100, accumulates=True)
    assert condition == "with checkpointing and a chunked loss"
    estimate, condition = estimate_search(spec, SearchRequest(Goal.INFER))
    assert condition == "with bfloat16 weights" and estimate.verdict == FITS
    assert estimate_search(spec.edit(model="bert-base-uncased"), SearchRequest(Goal.FULL)) is None
    assert estimate_search(spec.edit(gpu="t4"), SearchRequest(Goal.FULL)) is None


def test_a_plan_has_nothing_that_the_spec_does_not():
    """`build_spec_fields` names what a plan decides; the comparison rests on that."""
    plan = MethodPlan(METHOD_BY_KEY["lora-checkpointing"], "bfloat16", lora_rank=4)
    spec = TargetSpec(model="gpt2", **plan.build_spec_fields())
    assert estimate_spec(spec) is not None
    assert dataclasses.replace(spec, lora_dropout=0.5) != spec and estimate_spec(spec.edit(lora_dropout=0.5)) is None
