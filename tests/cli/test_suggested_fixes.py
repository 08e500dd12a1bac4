"""What `memprof run` suggests where memory runs out: a suggested fix takes the script to the figure beside it."""

from __future__ import annotations

import pytest

TOKENS = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
                         num_key_value_heads=8, vocab_size=64000)
    model = LlamaForCausalLM(config).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tokens = torch.randint(0, 64000, (8, 2048), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
POINTS = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        left, right = model(torch.randn(32768, 3, device="cuda")), model(torch.randn(8192, 3, device="cuda"))
        (left[:, None] - right[None]).square().sum(2).min(1).values.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def find_suggestions(document):
    return [suggestion for finding in document["findings"] for suggestion in finding["suggestions"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("vocab_size", "gib", "fix", "is_of_a_cause"),
    [(64000, 16, "chunked-loss", True), (16000, 5, "activation-checkpointing", False)],
)
def test_a_suggested_fix_does_what_it_says(memprof, script, vocab_size, gib, fix, is_of_a_cause):
    """Logits are the cause of a run that fits without them; activations are no fault of the program."""
    name = script(TOKENS.replace("64000", str(vocab_size)))
    options = ("run", "--gpu-vram", str(gib), "--beyond", "--json")
    document = memprof(*options, name).json
    assert document["findings"][0]["is_cause"] is is_of_a_cause
    suggestion = next(one for one in find_suggestions(document) if one["fix"] == fix)
    fixed = memprof(*options, "--fix", fix, name).json
    assert fixed["peak"]["reserved_bytes"] == pytest.approx(suggestion["required_bytes"], rel=0.1)
    assert fixed["verdict"]["fits"] == suggestion["fits"]


def test_what_no_fix_changes_is_not_run_with_fixes(memprof, script):
    name = script(POINTS)
    result = memprof("run", "--gpu", "v100-32gb", name)
    assert result.exit_code == 3 and "1,024 of the 32,768 rows" in result.stdout and "--fix" not in result.stdout
    (suggestion,) = find_suggestions(memprof("run", "--gpu", "v100-32gb", "--json", name).json)
    assert suggestion["fix"] is None and suggestion["fits"]
    assert "needs at least" in suggestion["text"]
