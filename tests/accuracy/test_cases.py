"""The truth cases run on the virtual GPU, and hold what their models and settings say that they must."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from memprof.flows import profile as flow
from memprof.report.documents.report import Report
from memprof.spec import Mode
from memprof.trace.events import Trace
from tests.accuracy.cases import CASES
from tests.lanes import by_day

MIB = 2**20
VOCABULARY = 128_256
LLAMA_PARAMETERS = 1_235_814_400


@dataclass(frozen=True)
class Ran:
    trace: Trace
    document: Report

    @property
    def peak(self) -> int:
        return self.document.peak.allocated_bytes

    def category(self, name: str) -> int:
        return self.document.peak.categories.get(name, 0)


@functools.cache
def ran(name: str) -> Ran:
    spec = CASES[name]
    if spec.adapter is not None:
        pytest.importorskip("peft")
    return Ran(*flow.profile(spec))


@pytest.mark.parametrize("name", by_day(CASES, *[*CASES][::6]))
def test_every_case_runs_and_its_ledger_sums_up(name: str) -> None:
    document = ran(name).document
    assert sum(document.peak.categories.values()) == document.peak.allocated_bytes > 0
    # Blocks of 512 bytes that belong to nothing in particular; a case with more is one that is not understood.
    assert ran(name).category("unattributed") < MIB
    assert document.verdict.fits


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-float32", 124_439_808),
        ("pythia-70m", 70_426_624),
        ("llama-1b-sdpa", LLAMA_PARAMETERS),
        ("bert-base", 109_514_298),
        ("vit-base", 86_567_656),
        ("t5-small", 60_506_624),
    ],
)
def test_adamw_keeps_twice_the_parameters(name: str, parameters: int) -> None:
    """And a step counter of 4 bytes, a block, for each; blocks and rests add less than 1%."""
    found = ran(name)
    assert found.document.target.num_parameters == parameters
    item = 2 if CASES[name].dtype == "bfloat16" else 4
    assert 2 * parameters * item <= found.category("optimizer state") < 2 * parameters * item * 1.01
    assert parameters * item <= found.category("parameters") < parameters * item * 1.01


def after_the_layers(name: str) -> int:
    """What is allocated when the last layer of the first forward is done."""
    return next(stage.allocated_bytes for stage in ran(name).document.stages if stage.name == "layer 15")


@pytest.mark.nightly
def test_checkpointing_keeps_less_and_eager_attention_more() -> None:
    """A case with checkpoints has twice the sequences of the one without, and still keeps less of each."""
    for attention in ("sdpa", "eager"):
        assert after_the_layers(f"llama-1b-{attention}-checkpointing") < after_the_layers(f"llama-1b-{attention}")
    # 16 layers keep at least a softmax of 32 heads in bfloat16 each.
    scores = 32 * 1024 * 1024 * 2
    assert after_the_layers("llama-1b-eager") - after_the_layers("llama-1b-sdpa") >= 16 * scores


def test_optimizer_implementations_keep_the_same_state_and_differ_in_temporaries() -> None:
    stages = {
        name: next(s for s in ran(name).document.stages if s.name == "optimizer step")
        for name in ("gpt2-float32", "gpt2-adamw-fused", "gpt2-adamw-single")
    }
    risen = {name: stage.peak_allocated_bytes - ran(name).category("parameters") * 4 for name, stage in stages.items()}
    # foreach makes one temporary as large as all parameters; the loop, as large as the embedding; fused, none.
    assert risen["gpt2-float32"] > risen["gpt2-adamw-single"] > risen["gpt2-adamw-fused"]
    difference = risen["gpt2-float32"] - risen["gpt2-adamw-fused"]
    assert difference == pytest.approx(124_439_808 * 4, rel=0.02)


def test_autocast_makes_half_precision_copies_of_float32_weights() -> None:
    for name, dtype in (("gpt2-amp-bfloat16", "bfloat16"), ("gpt2-amp-float16", "float16")):
        found = ran(name)
        assert found.category("parameters") == ran("gpt2-float32").category("parameters")
        # The embedding that is the head as well is the largest of the copies.
        assert any(
            storage.num_bytes == 50_257 * 768 * 2 and storage.dtype == dtype for storage in found.trace.storages
        ), name


def test_accumulation_adds_up_in_the_first_gradients() -> None:
    """Four batches of one keep the activations of one, not of four."""
    one, four = ran("gpt2-accumulation"), ran("gpt2-float32")
    assert one.category("optimizer state") == four.category("optimizer state")
    assert one.peak < four.peak


def test_the_chunked_loss_never_holds_the_logits() -> None:
    logits = 1024 * VOCABULARY * 2
    assert any(storage.num_bytes == logits for storage in ran("llama-1b-sdpa").trace.storages)
    chunked = ran("llama-1b-chunked-loss")
    assert chunked.document.target.num_parameters == LLAMA_PARAMETERS
    # In float32 they would be as large as the head itself, which is there.
    assert not any(storage.num_bytes == logits for storage in chunked.trace.storages)


def test_lora_trains_the_adapters_alone() -> None:
    """Rank 16 on queries and values (PEFT's choice for Llama): 16 layers x 16 x (2,048 + 2,048 + 2,048 + 512)."""
    trained = ran("llama-1b-lora").document.target.num_trainable_parameters
    assert trained == 16 * 16 * (2048 + 2048 + 2048 + 512)


def test_generation_holds_the_key_value_cache() -> None:
    """28 layers x 8 heads x 128 x keys and values x 2 bytes for each token: 512 of the prompt, up to 32 new ones."""
    spec = CASES["qwen3-0.6b-generation"]
    assert spec.mode is Mode.INFERENCE
    per_token = 28 * 8 * 128 * 2 * 2
    cache = ran("qwen3-0.6b-generation").category("KV cache")
    assert per_token * 512 <= cache <= per_token * (512 + 32) * 1.05
