"""memprof estimate: its two spellings, JSON, --exact, --explain, and usage error."""

import json

import pytest

from memprof.estimate.explain import CONSTANTS


def test_the_fixed_spelling(memprof):
    result = memprof("estimate", "--params", "1.2B", "--dtype", "float16")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "2.24 GiB of weights (2.4 GB)" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("weights alone"))
    assert row.split()[2:5] == ["4.47", "2.24", "2.24"]
    assert "float16*" in result.stdout


def test_json_has_bytes_and_gpus(memprof):
    found = memprof("estimate", "--model", "llama-3.2-1b", "--json", "--gpus", "2").json
    assert found["target"]["num_parameters"] == 1_235_814_400
    weights = next(row for row in found["estimates"] if (row["method"], row["dtype"]) == ("weights", "float16"))
    assert weights["allocated_bytes"] == 2 * 1_235_814_400
    for row in found["estimates"]:
        assert sum(row["categories"].values()) == row["allocated_bytes"]
        assert row["at_least_bytes"] <= row["device_used_bytes"] <= row["at_most_bytes"]
        assert set(row["gpus"].values()) <= {"fits", "borderline", "no"}
        assert row["ranges"].keys() == {"allocated", "reserved", "device used"}
        assert row["ranges"]["device used"] == [row["at_least_bytes"], row["at_most_bytes"]]
    assert {"inference, allocated", "lora, device used"} < found["bands"].keys()
    assert {row["strategy"] for row in found["sharded"]} == {"DDP", "ZeRO-1", "ZeRO-2", "FSDP, ZeRO-3"}
    assert found["exact"] is None


def test_one_gpu(memprof):
    result = memprof("estimate", "--model-size", "8B", "--gpu", "rtx-4090")
    lines = {line[:26].strip(): f"{line} " for line in result.stdout.splitlines() if "(" not in line[26:]}
    assert "fits" in lines["inference"]
    assert " no " in lines["full training, AdamW"]
    assert "* on rtx-4090" in result.stdout
    answer = (
        "llama-3.1-8b in bfloat16 on rtx-4090: about 16.57 GiB for inference (fits), 30.12 GiB for LoRA (does not fit)"
    )
    assert result.stdout.startswith(answer)


def test_lengths_that_vary(memprof):
    result = memprof("estimate", "--model", "gpt2", "--lengths", "lognormal:100,0.5", "--batch-size", "4", "--explain")
    assert "batches of 4 with lengths lognormal:100,0.5: " in result.stdout
    assert "longest of 200 batches" in result.stdout
    assert memprof("estimate", "--model", "gpt2", "--lengths", "lognormal:0,1").exit_code == 2


def test_a_stored_format_has_a_column(memprof):
    result = memprof("estimate", "--model", "qwen3-8b", "--quantize", "awq-int4", "--new-tokens", "100")
    assert "awq-int4*" in result.stdout
    full = next(line for line in result.stdout.splitlines() if line.startswith("full training"))
    assert full.split()[-2:] == ["-", "-"]  # what is stored so is not trained, and fits nowhere


def test_explain_shows_constants_with_sources_and_assumptions(memprof):
    result = memprof("estimate", "--params", "1.2B", "--explain")
    said = " ".join(result.stdout.split())
    for constant in CONSTANTS:
        assert constant.name in said
        assert " ".join(constant.source.split()) in said
    assert "Only a number of parameters was given" in said
    assert "1,200,000,000 parameters x 2 bytes" in said


@pytest.mark.nightly
@pytest.mark.slow
def test_exact_shows_both_term_by_term(memprof):
    result = memprof("estimate", "--model", "pythia-70m", "--context-length", "256", "--exact")
    assert result.exit_code == 0, result.stderr
    beside = result.stdout[result.stdout.index("Beside the virtual GPU") :]
    for name in ("parameters", "optimizer state", "logits and loss", "together"):
        assert name in beside
    assert beside.count("together") == 9


def test_a_model_that_is_not_known_shows_its_weights(memprof):
    result = memprof("estimate", "--model", "mixtral-8x7b")
    assert result.exit_code == 0
    assert "86.99 GiB of weights" in result.stdout
    assert "MixtralForCausalLM" in result.stdout
    assert "inference" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("give one of",)),
        (("--params", "1B", "--model", "gpt2"), ("give one of",)),
        (("--params", "banana"), ("not a number of parameters", "'banana'")),
        (("--params", "1.2Q"), ("not a number of parameters", "1.2B")),
        (("--params=-1B",), ("not a number of parameters",)),
        (("--params", "0"), ("not a number of parameters",)),
        (("--params", "9999T"), ("cannot synthesise",)),
        (("--params", "1B", "--context-length", "0"), ("--context-length must be at least 1",)),
        (("--params", "1B", "--batch-size", "-2"), ("--batch-size must be at least 1",)),
        (("--params", "1B", "--gpus", "0"), ("--gpus must be at least 1",)),
        (("--params", "1B", "--dtype", "float61"), ("unknown --dtype", "float")),
        (("--model", "gpt3"), ("unknown model", "gpt2")),
        (("--params", "1B", "--gpu", "rtx-4091"), ("unknown GPU", "rtx-4090")),
        (("--params", "1B", "--gpu-vram", "-4"), ("not an amount of memory",)),
        (("--params", "1B", "--gpu", "rtx-4090", "--gpu-vram", "8"), ("not both",)),
    ],
)
def test_wrong_use(memprof, arguments, parts):
    result = memprof("estimate", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert all(part in result.stderr for part in parts)


def test_a_broken_configuration(memprof, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    result = memprof("estimate", "--model", path)
    assert result.exit_code == 2
    assert "'hidden_size' is missing" in result.stderr


def test_a_plan_is_over_several_gpus(memprof):
    refused = memprof("estimate", "--model", "llama-3.1-8b", "--parallel", "fsdp")
    assert refused.exit_code == 2 and "add --gpus 8" in refused.stderr
    result = memprof("estimate", "--model", "llama-3.1-8b", "--gpus", 2, "--parallel", "tp=2", "--gpu", "h100-80gb")
    assert result.exit_code == 0 and "of the rank that needs most" in result.stdout
