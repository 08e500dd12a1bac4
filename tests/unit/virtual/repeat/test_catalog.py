"""Whole models of the catalog with their layers repeated, against the same with every layer run, event by event."""

import dataclasses

import pytest

from memprof.catalog import find_gpu, list_models
from memprof.flows.capture import capture_virtual
from memprof.remedies import on_spec
from memprof.spec import TargetSpec
from memprof.virtual.repeat import Repeats
from memprof.workload.models import find_source
from memprof.workload.step import Workload

DAYS = ("gpt2", "gemma-3-1b")
"""Of two groups of layers; and of one."""
CARD = find_gpu("h100-80gb")
LEAN = {"fixes": ("chunked-loss", "activation-checkpointing")}
WAYS = {
    "training": {},
    "inference": {"mode": "inference"},
    "checkpointing": {"activation_checkpointing": True},
    "LoRA": {"adapter": "lora"},
    "QLoRA": {"adapter": "lora", "quantize": "nf4"},
    "LoRA, checkpointing": {"adapter": "lora", "activation_checkpointing": True},
    "QLoRA, checkpointing": {"adapter": "lora", "quantize": "nf4", "activation_checkpointing": True},
    "autocast": {"amp": "bfloat16"},
    "autocast, lean": {"amp": "bfloat16", **LEAN},
    "QLoRA, lean": {"amp": "bfloat16", "adapter": "lora", "quantize": "nf4", **LEAN},
    "QLoRA under autocast": {"amp": "bfloat16", "adapter": "lora", "quantize": "nf4", "gradient_accumulation": 2},
    "accumulation": {"gradient_accumulation": 2},
    "gradients zeroed": {"zero_grad": "zero"},
    "generation": {"mode": "inference", "new_tokens": 3},
    "generation, many tokens": {"mode": "inference", "new_tokens": 30, "batch_size": 3, "context_length": 600},
    "generation, nf4": {"mode": "inference", "new_tokens": 2, "quantize": "nf4", "dtype": "bfloat16"},
    "generation, int8": {"mode": "inference", "new_tokens": 3, "quantize": "int8", "dtype": "bfloat16"},
    "generation, LoRA": {"mode": "inference", "new_tokens": 3, "adapter": "lora"},
    "generation, twice": {"mode": "inference", "new_tokens": 3, "steps": 2},
    "long": {"context_length": 4096},
    "one step of SGD": {"optimizer": "sgd", "steps": 1},
    "a remedy": {"fixes": ("chunked-loss", "optimizer-in-backward")},
    "offloaded activations": {"fixes": ("cpu-offload-activations",)},
    "chunks of a loss": {"fixes": ("chunked-loss=16",), "gradient_accumulation": 2},
    "compiled": {"fixes": ("compile",)},
    "compiled, lean": {"fixes": ("compile", *LEAN["fixes"])},
    "lengths": {"lengths": "lognormal:40,0.5", "steps": 6, "context_length": 128},
}
WITHOUT_NAMES = ("qwen3-30b-a3b",)
"""PEFT does not know what to adapt in it."""
OF_EXPERTS = ("training", "inference", "LoRA, checkpointing", "autocast, lean", "generation")
"""The ways that a model of 48 layers of experts is tried in, which takes half a minute each."""


def captured(spec, *, repeats):
    return capture_virtual(Workload(spec, find_source(spec), on_spec.switch_on), CARD, repeats=repeats)


def check_same(spec):
    run = captured(spec, repeats=False)
    trace = captured(spec, repeats=True)
    for field in dataclasses.fields(run):
        if field.name != "compiling":  # which tells seconds
            assert getattr(trace, field.name) == getattr(run, field.name), field.name


@pytest.mark.parametrize(
    "model",
    [
        *DAYS,
        *(pytest.param(entry.key, marks=pytest.mark.nightly) for entry in list_models()[::9] if entry.key not in DAYS),
    ],
)
def test_a_model_of_the_catalog(model):
    check_same(TargetSpec(model=model, context_length=64, batch_size=2))


@pytest.fixture
def counted(monkeypatch):
    """How many layers were repeated in each run."""
    found, settle = [], Repeats.settle
    monkeypatch.setattr(Repeats, "settle", lambda self: (found.append(self.times), settle(self))[1])
    return found


@pytest.mark.parametrize(
    ("model", "asked", "times"),
    [
        pytest.param("llama-3.2-1b", {"new_tokens": None}, 16 - 3, id="a prompt"),
        pytest.param("llama-3.2-1b", {"new_tokens": 4, "batch_size": 2}, 4 * (16 - 3), id="four tokens"),
        pytest.param("gemma-2-2b", {"quantize": "nf4", "dtype": "bfloat16"}, 2 * (26 - 5), id="two kinds, nf4"),
        pytest.param("gemma-3-1b", {"context_length": 600, "new_tokens": 3}, 3 * (26 - 5), id="full windows"),
        pytest.param("gpt2", {"quantize": "int8"}, 12 - 3, id="int8, whose first call makes more"),
        pytest.param("bloom-560m", {}, 0, id="two tensors are returned"),
        pytest.param("whisper-tiny", {"new_tokens": None}, 0, id="a cache of two caches"),
    ],
)
def test_inference_with_a_cache(model, asked, times, counted):
    check_same(
        TargetSpec(model=model, **{"mode": "inference", "steps": 1, "context_length": 64, "new_tokens": 2, **asked})
    )
    assert counted == [times]


@pytest.mark.slow
def test_qlora_as_recommend_runs_it(counted):
    check_same(TargetSpec(model="llama-3.2-1b", context_length=64, **WAYS["QLoRA, lean"]))
    assert counted == [2 * (16 - 5)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "way"), [*(("gemma-3-1b", way) for way in WAYS), *(("qwen3-30b-a3b", way) for way in OF_EXPERTS)]
)
def test_ways_to_use_a_model(model, way):
    asked = {"model": model, "context_length": 64, **WAYS[way]}
    if asked.get("adapter") and model in WITHOUT_NAMES:
        asked["lora_targets"] = "all-linear"
    check_same(TargetSpec(**asked))


@pytest.mark.nightly
def test_the_graph_before_a_stack_is_let_go_of_as_ever():
    """Adapters alone are trained, and the input of the first layer was made of a leaf that its graph alone holds."""
    asked = {"quantize": "nf4", "adapter": "lora", "lora_targets": "all-linear", "activation_checkpointing": True}
    check_same(TargetSpec(model="whisper-medium", context_length=2, batch_size=2, steps=1, **asked))


def test_deepseek_runs_seven_of_its_layers(counted):
    """Three are dense; of the 58 with experts the first two and the last two are run."""
    captured(TargetSpec(model="deepseek-v3", context_length=64, steps=1), repeats=True)
    assert counted == [61 - 7]
