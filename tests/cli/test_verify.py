"""`memprof verify`: passes for what is right, and fails for a fix that is not."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from memprof.fixes import head_loss, lazy_logits, micro_batch
from memprof.fixes.checkpointing import _CheckpointedForward
from memprof.flows.verify import bench
from tests.lanes import at_night, by_day


@pytest.mark.nightly
def test_a_fix_on_every_small_model(memprof):
    result = memprof("verify", "chunked-loss", "--seeds", 1, "--json")
    assert result.exit_code == 0
    found = result.json
    assert found["passed"] and found["command"] == "verify" and found["seeds"] == 1
    models = {"gpt2", "llama", "gemma2", "handwritten"}
    assert {row["model"] for row in found["deviations"]} == models
    for model in models:
        quantities = {row["quantity"] for row in found["deviations"] if row["model"] == model}
        assert quantities == {"loss", "gradients", "parameters after 3 steps"}
    assert all(row["fixed"] <= row["bound"] < 1e-3 for row in found["deviations"])
    [peak] = found["peaks"]
    # 512 tokens x 8,000 of the vocabulary x 4 bytes, and more than once; simulated and measured.
    for kind in ("", "measured_"):
        assert peak[kind + "original_bytes"] - peak[kind + "fixed_bytes"] > 512 * 8000 * 4
    # The same large allocations; of numbers of a few bytes there are some more or less.
    if peak["measured_on"] == "cpu":
        assert abs(peak["original_bytes"] - peak["measured_original_bytes"]) < 4096
    assert found["skipped"] == []
    # A float32 number is none of float64, wherever it was rounded.
    assert all(row["original"] > 0 for row in found["deviations"])
    assert found["reference_below_float64"] == {model: [] for model in models}


@pytest.mark.nightly
def test_fixes_of_other_kinds(memprof):
    names = ("lora", "vocabulary-cap", "freeze", "optimizer-in-backward")
    result = memprof("verify", *names, "--model", "llama", "--seeds", 1, "--json")
    assert result.exit_code == 0
    rows = {(row["fix"], row["quantity"]) for row in result.json["deviations"]}
    assert ("lora", "loss") in rows
    assert ("vocabulary-cap", "parameters after 3 steps") in rows
    assert ("freeze", "gradients") in rows
    assert ("optimizer-in-backward", "parameters after 3 steps") in rows


@pytest.mark.nightly
def test_quantized_weights(memprof):
    result = memprof("verify", "8-bit-weights", "4-bit-weights", "--json")
    assert result.exit_code == 0
    found = result.json
    assert found["skipped"] == []
    eight, four = found["precisions"]
    assert (eight["precision"], four["precision"]) == ("8-bit-weights", "4-bit-weights")
    for row, bits in ((eight, 8), (four, 4)):
        # Rounding to a grid of 2 ** bits steps over the range of a row or a block of numbers.
        assert 1 / 2**bits < row["logits_rms"] < 8 / 2**bits < row["bound"]
    assert all(peak["fixed_bytes"] < peak["original_bytes"] for peak in found["peaks"])


SMALL = ("gpt2", "llama", "gemma2", "handwritten")
OUTSIDE = ("micro-batch", "cpu-offload-optimizer", "fused-optimizer", "expandable-segments")


@pytest.mark.nightly
def test_what_is_outside_the_model(memprof):
    """Optimizers that fixes make are stepped; a micro-batch's step is called."""
    result = memprof("verify", *OUTSIDE, "--model", "handwritten", "--seeds", 1, "--json")
    _is_smaller_and_the_same(result, {(name, "handwritten") for name in OUTSIDE[:3]})


@pytest.mark.nightly
def test_what_is_outside_every_small_model(memprof):
    """And NPT, which has a model of its own."""
    result = memprof("verify", *OUTSIDE, "low-rank-npt", "--seeds", 1, "--json")
    deviations = {(name, model) for name in OUTSIDE[:3] for model in SMALL} | {("low-rank-npt", "npt")}
    peaks = _is_smaller_and_the_same(result, deviations)
    assert peaks["low-rank-npt"]["fixed_bytes"] < peaks["low-rank-npt"]["original_bytes"]


def _is_smaller_and_the_same(result, deviations):
    assert result.exit_code == 0
    assert {(row["fix"], row["model"]) for row in result.json["deviations"]} == deviations
    peaks = {row["fix"]: row for row in result.json["peaks"]}
    for name in ("micro-batch", "cpu-offload-optimizer", "expandable-segments"):
        assert peaks[name]["fixed_bytes"] < peaks[name]["original_bytes"]
    assert peaks["expandable-segments"]["workload"].endswith("reserved")
    return peaks


@pytest.mark.nightly
def test_a_micro_batch_that_weighs_rows_alike_fails(memprof, monkeypatch):
    def alike(self, labels, batch, first, targets):
        return torch.ones(first.shape[0])

    monkeypatch.setattr(micro_batch.MicroBatches, "_count_per_row", alike)
    result = memprof("verify", "micro-batch", "--model", "gpt2", "--seeds", 1)
    assert result.exit_code == 4


@pytest.mark.nightly
def test_precision_against_accuracy(memprof, monkeypatch):
    if not at_night():  # what half precision takes of a CPU is measured in test_tables; most have no float16
        monkeypatch.setattr(bench, "measure_peak", _not_measured)
    names = ("float16", "bfloat16", "amp-float16", "amp-bfloat16")
    models = ("llama", "gpt2") if at_night() else ("llama",)
    asked = [word for model in models for word in ("--model", model)]
    result = memprof("verify", *names, *asked, "--seeds", 1, "--json")
    assert result.exit_code == 0
    rows = {(row["model"], row["precision"]): row for row in result.json["precisions"]}
    assert len(rows) == 6 * len(models)
    for model in models:
        half, brain = rows[model, "float16"], rows[model, "bfloat16"]
        # Eight times the precision: so near that the ratio itself shows that both are real.
        assert 4 < brain["logits_rms"] / half["logits_rms"] < 16
        assert half["argmax_agreement"] >= brain["argmax_agreement"] > 0.9
        assert len(half["layers_rms"]) == 3
        # Norms and residuals in float32: nearer than everything in half precision, and not exact.
        assert 0 < rows[model, "amp-bfloat16"]["logits_rms"] < brain["logits_rms"]
        assert 0 < rows[model, "int8 weights"]["logits_rms"] < 0.05
        assert 0 < rows[model, "float32"]["logits_rms"] < half["logits_rms"] / 100
        # AMP keeps the sums between layers in float32: it is nearer than the pure dtype.
        for precision in ("float16", "bfloat16"):
            assert 0 < rows[model, "amp-" + precision]["layers_rms"][-1] < rows[model, precision]["layers_rms"][-1]


def _not_measured(*arguments, **options):
    raise RuntimeError("not measured by day")


@pytest.mark.nightly
def test_tables(memprof):
    result = memprof("verify", "chunked-loss", "bfloat16", "8-bit-optimizer", "--model", "handwritten", "--seeds", 1)
    assert result.exit_code == 0
    for text in (
        "Largest deviation from float64",
        "Precision against accuracy",
        "each layer",
        "Peak of a training",
        "passed",
    ):
        assert text in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 110


@pytest.mark.parametrize("broken", by_day(["loss", "gradients"]))
def test_a_wrong_fix_fails(memprof, monkeypatch, broken):
    right = head_loss.row_losses

    def wrong(hidden, *args, **kwargs):
        losses = right(hidden, *args, **kwargs)
        if broken == "loss":
            return losses * (1 + 1e-4)
        return losses + (losses - losses.detach()) * 1e-4

    monkeypatch.setattr(lazy_logits, "row_losses", wrong)
    result = memprof("verify", "chunked-loss", "--model", "gpt2", "--seeds", 1)
    assert result.exit_code == 4
    assert "FAILED" in result.stdout
    assert f"chunked-loss on gpt2: {broken}" in result.stdout


@pytest.mark.nightly
def test_a_layer_that_runs_on_other_inputs_fails(memprof, monkeypatch):
    right = _CheckpointedForward.__call__
    monkeypatch.setattr(
        _CheckpointedForward, "__call__", lambda self, x, *args, **kw: right(self, x * 1.001, *args, **kw)
    )
    result = memprof("verify", "activation-checkpointing", "--model", "handwritten", "--seeds", 1)
    assert result.exit_code == 4


def test_any_causal_model(memprof, tmp_path):
    file = tmp_path / "config.json"
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200,
    }  # fmt: skip
    file.write_text(json.dumps(config))
    result = memprof("verify", "chunked-loss", "--model", file, "--seeds", 1, "--json")
    assert result.exit_code == 0
    assert len(result.json["deviations"]) == 3


OWN_CODE = """
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size)
        self.post_init()
    def forward(self, input_ids, labels=None, **others):
        logits = self.lm_head(self.embed(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutput(loss=loss, logits=logits)
"""


def test_a_models_own_code_needs_leave(memprof, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "modeling_own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {"model_type": "own", "architectures": ["OwnForCausalLM"], "width": 16, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
    command = ("verify", "freeze", "--model", tmp_path, "--seeds", 1, "--json")
    refused = memprof(*command)
    assert refused.exit_code == 2 and "--trust-remote-code" in refused.stderr
    found = memprof(*command, "--trust-remote-code")
    assert found.exit_code == 0, found.stderr
    assert any("modeling_own.OwnForCausalLM" in note for note in found.json["notes"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["chunked-los"], "did you mean 'chunked-loss'"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--seeds", "0"], "at least 1"),
        (["--model", "vit-base"], ""),
    ],
)
def test_wrong_use(memprof, arguments, problem):
    result = memprof("verify", *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.nightly
def test_an_8_bit_optimizer_beside_float32_and_bfloat16(memprof):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has the 8-bit optimizer with a kernel for the CPU")
    result = memprof("verify", "8-bit-optimizer", "--model", "llama", "--seeds", 1, "--json")
    full, brain, eight = result.json["optimizers"]
    assert result.exit_code == 0
    assert full["update_rms"] < 1e-3 < eight["update_rms"] < 0.5
    assert brain["update_rms"] > 0 and brain["bound"] is None
    # Two bytes and some scales for each parameter, where float32 takes eight.
    assert 2 * full["state_bytes"] / 8 < eight["state_bytes"] < 2.2 * full["state_bytes"] / 8


def test_what_cannot_be_tried_is_no_pass(memprof, monkeypatch):
    for package in ("bitsandbytes.optim", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    result = memprof("verify", "8-bit-optimizer", "--model", "llama", "--seeds", 1)
    assert result.exit_code == 1
    assert "not tried: 8-bit-optimizer on llama" in result.stdout
