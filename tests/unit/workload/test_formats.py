"""quantization_config of a checkpoint: obeyed, or refused by name."""

from __future__ import annotations

import pytest

from memprof.errors import UsageError
from memprof.spec import QUANTIZATIONS, STORED_FORMATS, TargetSpec
from memprof.workload.formats import check_use, checkpoint_format, requested_format

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def found(said, **config):
    return checkpoint_format({"model_type": "qwen3", **config, "quantization_config": said}, "a folder")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (NF4, "nf4"),
        ({"load_in_4bit": True, "load_in_8bit": False}, "fp4"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, "int8"),
        (GPTQ, "gptq-int4"),
        (
            {**GPTQ, "bits": 8, "dataset": ["a text"], "damp_percent": 0.01, "lm_head": False, "dynamic": {}},
            "gptq-int8",
        ),
        ({**AWQ, "modules_to_not_convert": ["gate"]}, "awq-int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8"),
    ],
)
def test_what_is_obeyed(said, name):
    stored = found(said)
    assert stored.name == name and stored.from_checkpoint
    assert stored.config["quant_method"] in ("bitsandbytes", "gptq", "awq", "fp8")


def test_no_configuration_and_an_empty_one():
    assert checkpoint_format({"model_type": "qwen3"}, "") is None
    assert found({}) is None
    assert found(None) is None


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ["compressed-tensors"]),
        ({"quant_method": "hqq"}, ["hqq"]),
        ({"bits": 4}, ["no quant_method"]),
        ({**GPTQ, "bits": 3}, ["gptq", "bits 3"]),
        ({**GPTQ, "sym": False, "group_size": 100}, ["sym False", "group_size 100"]),
        ({**GPTQ, "dynamic": {"+:x": {"bits": 8}}, "lm_head": True}, ["dynamic", "lm_head True"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["format 'marlin'"]),
        ({**GPTQ, "backend": "exllama"}, ["backend 'exllama'"]),
        ({**AWQ, "version": "gemv"}, ["format 'gemv'"]),
        ({**AWQ, "do_fuse": True}, ["do_fuse True"]),
        ({**NF4, "llm_int8_enable_fp32_cpu_offload": True}, ["llm_int8_enable_fp32_cpu_offload True"]),
        ({**NF4, "bnb_4bit_quant_type": "nf8"}, ["bnb_4bit_quant_type 'nf8'"]),
        ({"quant_method": "fp8", "fmt": "e5m2", "expert_dtype": "fp4"}, ["fmt 'e5m2'", "expert_dtype 'fp4'"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size"]),
        ({"quant_method": "mxfp4"}, ["model_type 'qwen3'"]),
    ],
)
def test_what_is_refused_is_named_in_one_error(said, named):
    with pytest.raises(UsageError, match="not simulated") as raised:
        found(said)
    assert all(text in raised.value.value for text in named)
    assert "a folder" in raised.value.value
    assert all(name in raised.value.hint for name in STORED_FORMATS)


def test_mixtures_of_experts_in_packed_integers_are_refused():
    with pytest.raises(UsageError, match="a mixture of experts"):
        found(GPTQ, num_experts=8)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_each_option_is_a_configuration_of_its_name(name):
    spec = TargetSpec(model="gpt2", quantize=name, mode="inference")
    stored = requested_format(spec)
    assert stored.name == name and not stored.from_checkpoint
    if not name.startswith("gguf"):
        config = {"model_type": "gpt_oss", "quantization_config": dict(stored.config)}
        assert checkpoint_format(config, "").name == name


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mode": "inference", "quantize": "nf4"}, "quantized already"),
        ({}, "not trained"),
        ({"npt": "low-rank"}, "does not go with quantized weights"),
    ],
)
def test_what_does_not_go_with_a_stored_checkpoint(fields, problem):
    with pytest.raises(UsageError, match=problem):
        check_use(found(GPTQ), TargetSpec(model="x", **fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantize": "mxfp4", "adapter": "lora"}, "no backward"),
        ({"quantize": "gguf-q4_k", "adapter": "lora"}, "no backward"),
        ({"quantize": "fp8"}, "not trained"),
        ({"quantize": "fp8", "mode": "inference", "device": "cpu"}, "not measured"),
    ],
)
def test_what_does_not_go_with_the_option(fields, problem):
    with pytest.raises(UsageError, match=problem):
        TargetSpec(model="gpt2", **fields)
