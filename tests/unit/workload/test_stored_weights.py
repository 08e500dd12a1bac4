"""Weights as checkpoints store them: their bytes by the formats' formulas, their kernels' temporaries, adapters."""

from __future__ import annotations

import json

import pytest

from memprof.errors import UsageError
from memprof.flows import profile as flow
from memprof.spec import TargetSpec

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **SIZES}
# Inputs and outputs of the linear layers but the head.
MATRICES = 2 * [(512, 512), (512, 256), (512, 256), (512, 512), (512, 1024), (512, 1024), (1024, 512)]
LINEAR = sum(rows * columns for rows, columns in MATRICES)
PROCESSORS = 132  # Of the H100.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.fixture
def profile(tmp_path):
    def run(config=QWEN3, said=None, **fields):
        made = {**config, "quantization_config": said} if said else config
        (tmp_path / "config.json").write_text(json.dumps(made), encoding="utf-8")
        fields = {"context_length": 64, "steps": 1, "mode": "inference", **fields}
        return flow.profile(TargetSpec(model=str(tmp_path), **fields))

    return run


def parameters(result):
    return result[1].peak.categories["parameters"]


def in_blocks(*sizes):
    """The allocator's blocks of tensors with these sizes."""
    return sum(-(-size // 512) * 512 for size in sizes)


def fp8(rows, columns):
    return in_blocks(rows * columns, 4 * -(-rows // 128) * -(-columns // 128))


def gptq(bits, rows, columns):
    """What AutoGPTQ's layer has in a file: weights, zeros, scales, and the group of each row."""
    groups = -(-rows // 128)
    return in_blocks(rows * columns * bits // 8, groups * columns * bits // 8, 2 * groups * columns, 4 * rows)


def marlin(bits, rows, columns):
    """After Marlin has repacked it: no zeros and no groups, and its locks."""
    return in_blocks(rows * columns * bits // 8, 2 * -(-rows // 128) * columns, 4 * PROCESSORS)


def awq(rows, columns):
    groups = -(-rows // 128)
    return in_blocks(rows * columns // 2, groups * columns // 2, 2 * groups * columns, 4 * PROCESSORS)


FORMULAS = {
    "fp8": fp8,
    "gptq-int8": lambda rows, columns: marlin(8, rows, columns),
    "gptq-int4": lambda rows, columns: marlin(4, rows, columns),
    "awq-int4": awq,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_are_the_formats(profile, name):
    plain = profile()
    stored = profile(quantize=name)
    expected = sum(FORMULAS[name](*matrix) for matrix in MATRICES)
    assert parameters(stored) == parameters(plain) - 2 * LINEAR + expected
    assert stored[1].target.num_parameters == plain[1].target.num_parameters
    assert any(name in sentence for sentence in stored[0].assumptions)


def test_gptq_for_training_is_as_it_lies_in_the_file(profile):
    unpacking = profile(said={**GPTQ, "backend": "triton"})
    packed = sum(gptq(4, *matrix) for matrix in MATRICES)
    assert parameters(unpacking) == parameters(profile()) - 2 * LINEAR + packed


def test_a_configuration_is_obeyed_as_the_option_is(profile):
    asked = profile(quantize="gptq-int4")
    obeyed = profile(said=GPTQ)
    assert parameters(obeyed) == parameters(asked)
    assert obeyed[1].peak.allocated_bytes == asked[1].peak.allocated_bytes
    assert any("as the configuration says" in sentence for sentence in obeyed[0].assumptions)


def test_rows_in_another_order_keep_their_groups(profile):
    more = parameters(profile(said={**GPTQ, "desc_act": True})) - parameters(profile(said=GPTQ))
    assert more == sum(2 * 4 * rows for rows, _ in MATRICES)


def test_what_is_not_to_be_converted_is_not(profile):
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    kept = profile(said={**block, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate_proj"]})
    assert parameters(kept) == parameters(profile(said=block)) + 2 * 512 * 1024 - fp8(512, 1024)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    assert parameters(profile(said={**awq, "modules_to_not_convert": ["k_proj"]})) == parameters(
        profile(said=awq)
    ) + 2 * (2 * 512 * 256 - FORMULAS["awq-int4"](512, 256))
    chosen = profile(said={**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]})
    assert parameters(profile()) - parameters(chosen) == 4 * (2 * 512 * 1024) - 2 * (
        marlin(4, 512, 1024) + marlin(4, 1024, 512)
    )


def test_bitsandbytes_of_a_configuration_is_that_of_the_option(profile):
    pytest.importorskip("bitsandbytes")
    said = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    assert parameters(profile(said=said)) == parameters(profile(quantize="nf4"))
    skipped = profile(said={**said, "llm_int8_skip_modules": ["lm_head", "up_proj"]})
    assert parameters(skipped) > parameters(profile(said=said))


def test_long_inputs_of_awqs_gemm_unpack_the_weight(profile):
    """Above 1,024 tokens; the largest is an MLP's."""
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "backend": "gemm"}
    trace, _ = profile(said=said, context_length=1025)
    unpacked = [s for s in trace.storages if s.num_bytes == 2 * 512 * 1024 and trace.op(s) == "aten.new_empty"]
    assert len(unpacked) == 2 * 3
    trace, _ = profile(said=said, context_length=1000)
    assert not [s for s in trace.storages if s.num_bytes == 2 * 512 * 1024 and trace.op(s) == "aten.new_empty"]


@pytest.mark.parametrize("name", ["fp8", "gptq-int8", "awq-int4"])
def test_adapters_on_stored_weights(profile, name):
    pytest.importorskip("peft")
    trace, document = profile(quantize=name, mode="train", adapter="lora", lora_targets="q_proj,up_proj")
    assert document.failure is None and not trace.mismatches
    assert document.target.num_trainable_parameters == 2 * 8 * (512 + 512 + 512 + 1024)
    if name == "gptq-int8":  # autograd keeps the weights that are unpacked
        kept = document.peak.categories["activations"]
        plain = profile(mode="train", adapter="lora", lora_targets="q_proj,up_proj")[1].peak.categories["activations"]
        assert kept - plain > LINEAR * 2 * 0.8
        assert any("autograd keeps it" in sentence for sentence in trace.assumptions)


def test_gpus_without_float8_unpack_it(profile):
    trace, _ = result = profile(quantize="fp8", gpu="a100-80gb")
    assert parameters(result) == parameters(profile(gpu="a100-80gb"))
    assert any("unpacked the fp8 weights" in sentence for sentence in trace.assumptions)


GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "hidden_size": 192,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 1024, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "tile"), [("h100-80gb", 64), ("a100-80gb", 1)])
def test_mxfp4_experts(profile, gpu, tile):
    """Half a byte and a scale for 32; Hopper's tiles have 64 bytes a side. Biases become float32."""
    pytest.importorskip("transformers.integrations.mxfp4")
    plain = profile(GPT_OSS, gpu=gpu)
    stored = profile(GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, gpu=gpu)
    experts = 2 * 4
    weights = experts * 3 * 192 * 192

    def blocks(rows, columns):
        return -(-rows // tile) * tile * (-(-columns // 2 // tile) * tile)

    expected = experts * (blocks(384, 192) + blocks(192, 192)) + weights // 32 + 2 * experts * (384 + 192)
    assert parameters(stored) == parameters(plain) - 2 * weights + expected
    assert stored[1].target.num_parameters == plain[1].target.num_parameters
    assert any("gpt-oss-triton-kernels" in sentence for sentence in stored[0].assumptions)


LFM2 = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "dtype": "float32", "vocab_size": 1024,
    "hidden_size": 512, "intermediate_size": 1024, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
}  # fmt: skip
# Weights and bytes of a block (ggml-common.h).
BLOCKS = {"q4_0": (32, 18), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "q8_0": (32, 34)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_gguf_blocks_of_a_type_that_transformers_leaves_packed(profile, kind):
    pytest.importorskip("transformers.integrations.gguf")
    plain = profile(LFM2)
    stored = profile(LFM2, quantize=f"gguf-{kind}")
    matrices = 1024 * 512  # the embedding, to which the head is tied
    matrices += 2 * 3 * 512 * 1024 + 512 * (512 + 128 + 128 + 512) + 512 * (3 * 512 + 512)
    weights, size = BLOCKS[kind]
    assert parameters(stored) == parameters(plain) - 4 * matrices + matrices // weights * size
    assert stored[1].target.num_parameters == plain[1].target.num_parameters


def test_gguf_of_other_types_is_unpacked(profile):
    stored = profile(quantize="gguf-q4_k")
    assert parameters(stored) == parameters(profile())
    assert any("unpacked the gguf-q4_k weights" in sentence for sentence in stored[0].assumptions)


@pytest.mark.parametrize(
    ("config", "quantize", "problem"),
    [
        (QWEN3, "mxfp4", "nothing of this model"),
        ({**LFM2, "hidden_size": 480, "num_attention_heads": 6}, "gguf-q4_k", "blocks of 256"),
        (GPT_OSS, "gptq-int4", "mixtures of experts"),
    ],
)
def test_what_cannot_be_stored_so(profile, config, quantize, problem):
    with pytest.raises(UsageError, match=problem):
        profile(config, quantize=quantize)


def test_what_is_refused_ends_the_run_before_it_starts(profile):
    with pytest.raises(UsageError, match="not simulated") as raised:
        profile(said={"quant_method": "compressed-tensors"})
    assert "compressed-tensors" in raised.value.value
