"""What fixes save: peaks of training steps on the virtual GPU, with and without each."""

from __future__ import annotations

import pytest
import torch
import transformers

import memprof
from tests.lanes import by_day


def peak(name=None, **given) -> int:
    """Peak of a training step of a small decoder on the virtual GPU."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=8_000, attn_implementation="eager",
    )  # fmt: skip
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = transformers.LlamaForCausalLM(config).to("cuda")
        applied = memprof.apply(model, name, **given) if name else None
        optimizer = applied.results.get(name) if applied else None
        optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            ids = torch.zeros(1, 1024, dtype=torch.int64, device="cuda")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu.report().peak.allocated_bytes


PARAMETERS = 8 * (4 * 256 * 256 + 3 * 256 * 1024) + 2 * 8_000 * 256
LOGITS = 1024 * 8_000 * 4
SCORES = 4 * 1024 * 1024 * 4


@pytest.fixture(scope="module")
def original() -> int:
    return peak()


SAVED = [
    # Parameters and both states at half their size, and most activations.
    ("bfloat16", {}, 3 * 2 * PARAMETERS),
    ("float16", {}, 3 * 2 * PARAMETERS),
    # Rows of embedding and head with gradient and states; three times the logits.
    ("vocabulary-cap", {"vocab_size": 4_000}, 3 * 4 * 2 * 4_000 * 256 + LOGITS),
    ("freeze", {"frozen": "model.embed_tokens*"}, 2 * 4 * 8_000 * 256),
    ("lora", {"lora_rank": 4}, 2 * 4 * PARAMETERS * 0.9),
    ("sdpa-attention", {}, 7.9 * SCORES),
    ("activation-checkpointing", {}, 6 * 2 * SCORES),
    ("activation-checkpointing", {"every": 2}, 3 * 2 * SCORES),
    ("activation-checkpointing", {"modules": "self_attn"}, 7 * SCORES),
    # The scores are a product and stay, their softmax runs again; so do norms and what the MLP multiplies.
    ("activation-checkpointing", {"policy": "selective"}, 5 * SCORES),
    ("cpu-offload-activations", {}, 6 * 2 * SCORES),
    ("cpu-offload-optimizer", {}, 2 * 4 * PARAMETERS * 0.9),
    ("cpu-offload-weights", {}, 6 * 2 * SCORES),
]
BY_DAY = [case for case in SAVED if case[0] in ("bfloat16", "lora", "sdpa-attention") or "policy" in case[1]]


@pytest.mark.parametrize(
    ("name", "given", "saved"), by_day(SAVED, *BY_DAY), ids=lambda value: value if isinstance(value, str) else None
)
def test_the_peak_shrinks(original, name, given, saved):
    assert original - peak(name, **given) >= saved


def test_gradients_go_as_they_come():
    """No step has all gradients: with nothing else large, the peak falls by most of them."""

    def at(in_backward):
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).to("cuda")
            optimizer = torch.optim.SGD(model.parameters())
            if in_backward:
                memprof.apply(model, "optimizer-in-backward", optimizer=torch.optim.SGD)
            model(torch.zeros(1, 1024, device="cuda")).sum().backward()
            if not in_backward:
                optimizer.step()
        return gpu.report().peak.allocated_bytes

    assert at(False) - at(True) >= 14 * 1024 * 1024 * 4


def test_weights_are_on_the_gpu_one_layer_at_a_time():
    def at(depth):
        with memprof.virtual_gpu("h100-80gb") as gpu, torch.no_grad():
            layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024)) for _ in range(depth)]
            model = torch.nn.Sequential(*layers)
            memprof.apply(model, "cpu-offload-weights")
            model(torch.zeros(1, 1024, device="cuda"))
        return gpu.report().peak.allocated_bytes

    assert at(8) == at(16)
