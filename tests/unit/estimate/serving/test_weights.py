"""Weights of served models: counts of the catalog, division over ranks, rounding, rotary tables, formats."""

from __future__ import annotations

import math

import pytest

from memprof.errors import UsageError
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.model import _BASE_FAMILIES, build_served_model
from memprof.estimate.serving.weights import (
    WeightFormat,
    _count_rotary_bytes,
    count_weight_bytes,
    find_weight_format,
    list_parts,
    round_allocation,
)
from memprof.units import GIB, MIB, round_up
from memprof.workload.catalog import find_model, list_models

HOPPER = (9, 0)

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
# The closed form has no layer of these, or of Gemma 4 not all: per-layer embeddings and shared keys.
UNKNOWN = (
    "falcon-7b", "bloom-560m", "mamba-130m", "gemma-4-e2b", "gemma-4-e4b", "gemma-4-26b-a4b", "gemma-4-31b",
    "llama-4-scout", "llama-4-maverick", "ministral-3-3b", "ministral-3-8b", "ministral-3-14b", "deepseek-v4-flash",
    "deepseek-v3.2", "glm-5", "kimi-linear-48b-a3b", "olmo-3-7b", "olmo-3-32b", "smollm3-3b", "seed-oss-36b",
)  # fmt: skip
# Layers with experts, and experts: a bias of each one's score, which is no parameter in transformers.
SCORE_BIASES = {"deepseek-v3": (58, 256), "kimi-k2": (60, 384), "glm-4.5-air": (45, 128), "glm-4.6": (89, 160)}
DECODERS = [entry.key for entry in list_models() if entry.task == "causal-lm" and entry.key not in UNKNOWN]


def test_counts_are_those_of_the_catalog() -> None:
    for key in DECODERS:
        model, g = load_served_model(key), load_served_model(key).geometry
        padding = (round_up(g.vocab, 64) - g.vocab) * (g.hidden * (1 if g.tied else 2) + g.has_head_bias)
        buffers = math.prod(SCORE_BIASES.get(key, (0,)))
        count = sum(part.count * part.copies for part in list_parts(model))
        assert count - padding - buffers == find_model(key).num_parameters


SMALL = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA_4 = {
    **SMALL, "model_type": "gemma4_text", "global_head_dim": 24,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
}  # fmt: skip
NEMOTRON = {
    **SMALL, "model_type": "nemotron_h", "tie_word_embeddings": False, "num_hidden_layers": 4, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "M*-M"}, 45_448),
        (NEMOTRON | {"hybrid_override_pattern": "ME*E"}, 51_260),
        (
            GEMMA_4 | {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 20,
                       "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            210_312 + 6,
        ),
        # vLLM also loads the keys and values of the two layers that share those of others, with their norms.
        (
            GEMMA_4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
                       "vocab_size_per_layer_input": 64},
            176_756 + 6 - 8 + 4 * 48 * (12 + 24) + (12 + 24),
        ),
    ],
)  # fmt: skip
def test_counts_of_layers_of_several_kinds(config: dict[str, object], count: int) -> None:
    """As transformers 5.23 makes the model; of Gemma 4 with a scalar of each layer, and without one norm of 8."""
    assert sum(part.count * part.copies for part in list_parts(build_served_model(config, "tiny"))) == count


BLOCKS = {
    "attention": "qkv, attention output, compression, queries, keys, values",
    "state": "state input, state output", "mlp": "MLP up, MLP down, wide MLP up, wide MLP down",
    "experts": "experts' up, experts' down", "shared expert": "shared expert's up, shared expert's down",
    "": "embedding, output head, attention biases, routers, state's own, norms, embeddings of each layer",
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        NEMOTRON | {"hybrid_override_pattern": "ME*-"},
        GEMMA_4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
        LLAMA | {"model_type": "deepseek_v2", "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                 "v_head_dim": 24, "q_lora_rank": 32},
    ],
)  # fmt: skip
def test_parts_that_quantization_makes_smaller(config: dict[str, object]) -> None:
    for part in list_parts(build_served_model(config, "tiny")):
        assert part.name == "projections of each layer" or part.name in BLOCKS[part.block]


@pytest.mark.parametrize(
    ("family", "entries", "expected"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True}, {"has_qkv_bias": True, "has_o_bias": True}),
        ("gpt_oss", {}, {"has_qkv_bias": True, "has_o_bias": True}),
        ("glm4_moe", {"attention_bias": True}, {"has_qkv_bias": True, "qk_norm": ""}),
        ("qwen2", {}, {"has_qkv_bias": True}),
        ("qwen3", {}, {"qk_norm": "head"}),
        ("gemma", {}, {"tied": True}),
        ("gemma", {"tie_word_embeddings": False}, {}),
        ("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M*--"}, {"is_gated": False}),
    ],
)
def test_what_a_family_has_unless_its_configuration_says_otherwise(
    family: str, entries: dict[str, object], expected: dict[str, object]
) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    geometry = build_served_model(config | {"model_type": family} | entries, "tiny").geometry
    usual = {"has_qkv_bias": False, "has_o_bias": False, "qk_norm": "", "tied": False, "is_gated": True}
    assert {name: getattr(geometry, name) for name in usual} == usual | expected


FAMILIES = {
    "llama": "llama granite gemma gpt_oss deepseek_v2 deepseek_v3 kimi_k2 nemotron_h", "mistral": "mistral mixtral",
    "qwen2": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen2_5_vl_text qwen2_vl_text mimo_vl",
    "qwen3": "qwen3 qwen3_moe glm4_moe qwen3_next qwen3_5_text qwen3_5_moe_text minimax_m2 qwen3_vl_text "
    "qwen3_vl_moe_text",
    "gemma3_text": "gemma3_text gemma4_text gemma4_unified_text", "gemma2": "gemma2", "phi3": "phi3", "olmo2": "olmo2",
    "gpt2": "gpt2", "gpt_neox": "gpt_neox", "opt": "opt", "phi": "phi",
}  # fmt: skip


@pytest.mark.parametrize("base", FAMILIES)
def test_families_whose_attention_and_mlp_are_those_of_another(base: str) -> None:
    assert {_BASE_FAMILIES.get(family) for family in FAMILIES[base].split()} == {base}


def test_ranks_divide_matrices_and_repeat_keys() -> None:
    model = build_served_model(LLAMA, "tiny")
    parts = {part.name: part for part in list_parts(model, 4)}
    # Two query heads of 32 on each rank; two key heads on four ranks are one each, and as many values.
    assert parts["qkv"].count == 256 * (2 * 32 + 2 * 32)
    assert parts["attention output"].count == 256 * 2 * 32
    assert parts["MLP up"].count == 2 * 256 * 128
    assert parts["embedding"].count == 1024 // 4 * 256
    assert parts["norms"].count == (2 * 2 + 1) * 256


def test_heads_have_to_be_divisible() -> None:
    with pytest.raises(UsageError, match="8 attention heads"):
        list(list_parts(build_served_model(LLAMA, "tiny"), 3))


@pytest.mark.parametrize(
    ("num_bytes", "counted", "limited"),
    [
        (1000, 1024, 1024),
        (int(9.9 * MIB), round_up(int(9.9 * MIB), 512), round_up(int(9.9 * MIB), 512)),
        (129 * MIB + MIB // 2, 130 * MIB, 130 * MIB),  # Half a MiB is not split off.
        (24 * MIB + MIB // 2, 24 * MIB + MIB // 2, 26 * MIB),  # 1.5 MiB are, but not of a block from 20 MiB on.
        (12 * MIB + MIB // 4, 12 * MIB + MIB // 4, 12 * MIB + MIB // 4),
        (30 * MIB, 30 * MIB, 30 * MIB),
    ],
)
def test_allocations_are_rounded_as_by_torch(num_bytes: int, counted: int, limited: int) -> None:
    assert round_allocation(num_bytes) == counted
    assert round_allocation(num_bytes, limits_splits=True) == limited


@pytest.mark.parametrize(
    ("name", "ranks", "gib"),
    [("llama-3.1-8b", 1, 14.99), ("llama-3.1-8b", 4, 3.77), ("qwen3-14b", 1, 27.52), ("gpt-oss-120b", 4, 17.23)],
)
def test_weights_of_published_logs(name: str, ranks: int, gib: float) -> None:
    model = load_served_model(name)
    capability = (8, 0) if name.startswith("gpt") else (9, 0)
    assert round(count_weight_bytes(model, find_weight_format(model, None), ranks, capability) / GIB, 2) == gib


def test_linear_scaling_makes_the_rotary_table_longer() -> None:
    model = load_served_model("google/gemma-3-4b-it")
    plain = {**model.config, "text_config": {**model.config["text_config"], "rope_parameters": {}}}
    difference = count_weight_bytes(model, None, 1, HOPPER) - count_weight_bytes(
        build_served_model(plain, "plain"), None, 1, HOPPER
    )
    assert difference == 7 * 131072 * 256 * 2


GEMMA_3 = {**SMALL, "model_type": "gemma3_text", "max_position_embeddings": 128}
LATENT = {
    **LLAMA, "model_type": "deepseek_v2", "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (LLAMA, 128 * 32),
        (LLAMA | {"partial_rotary_factor": 0.5}, 128 * 16),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.25}}, 128 * 8),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}, 256 * 32),  # so many positions
        (LATENT, 128 * 8),
        (LLAMA | {"model_type": "gpt_neox", "rotary_pct": 0.25}, 128 * 8),
        (LLAMA | {"model_type": "phi", "partial_rotary_factor": 0.25}, 128 * 8),
        (LLAMA | {"model_type": "opt", "ffn_dim": 512, "word_embed_proj_dim": 256}, 0),  # learned positions
        (NEMOTRON | {"hybrid_override_pattern": "M*-M"}, 0),
        (GEMMA_3, 2 * 128 * 12),
        (GEMMA_3 | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 9 * 128 * 12),
        (GEMMA_3 | {"rope_parameters": {"full_attention": {"rope_type": "default", "factor": 8.0}}}, 2 * 128 * 12),
        (GEMMA_4, 128 * (12 + 24)),
    ],
)
def test_tables_of_cosines_and_sines(config: dict[str, object], elements: int) -> None:
    assert _count_rotary_bytes(build_served_model(config, "tiny"), 2) == elements * 2


def test_quantized_latent_attention_keeps_copies_that_are_not() -> None:
    """Of the matrix from 64 elements to the 8 heads' 16 + 24, in each of two layers; a rank has half of it."""
    model = build_served_model(LATENT, "tiny")
    for ranks in (1, 2):
        parts = sum(
            part.copies * round_up(part.count * (1 if part.block else 2), 512) for part in list_parts(model, ranks)
        )
        table, copies = 128 * 8 * 2, 2 * 64 * 8 // ranks * 40 * 2
        assert count_weight_bytes(model, WeightFormat("fp8", 1.0), ranks, HOPPER) == parts + table + copies


@pytest.mark.parametrize(
    ("capability", "ranks", "factor"),
    [((9, 0), 1, 512 / 300), ((8, 0), 1, 512 * 128 / (300 * 100)), ((8, 0), 2, 512 * 128 / (300 * 50)),
     ((10, 0), 1, 512 * 128 / (300 * 100))],
)  # fmt: skip
def test_experts_in_4_bits_are_padded(capability: tuple[int, int], ranks: int, factor: float) -> None:
    config = {**LLAMA, "model_type": "gpt_oss", "hidden_size": 300, "intermediate_size": 100, "num_local_experts": 4,
              "head_dim": 32, "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    model = build_served_model(config, "tiny")
    experts = [part for part in list_parts(model, ranks) if part.block == "experts"]
    plain = sum(part.copies * round_up(part.count * 2, 512) for part in experts)
    padded = sum(part.copies * round_up(round(part.count * 17 / 32 * factor), 512) for part in experts)
    found = count_weight_bytes(model, find_weight_format(model, None), ranks, capability)
    assert found == count_weight_bytes(model, None, ranks, capability) - plain + padded


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "bfloat16"), ("float16", "float16"), (None, "bfloat16"), ("text", "float16")]
)
def test_weights_are_loaded_in_half_precision(dtype: str | None, expected: str) -> None:
    """By vLLM, which takes bfloat16 for float32."""
    config = {name: value for name, value in LLAMA.items() if name != "dtype"}
    if dtype == "text":
        config |= {"text_config": {"model_type": "llama", "dtype": "float16"}}
    elif dtype is not None:
        config["torch_dtype"] = dtype
    assert build_served_model(config, "tiny").dtype == expected


def _compress(bits: int, kind: str) -> dict[str, object]:
    weights = {"num_bits": bits, "type": kind}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "gptq8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (_compress(8, "int"), "int8"),
        (_compress(8, "float"), "fp8"),
        (_compress(4, "int"), "gptq"),
        (_compress(4, "float"), "nvfp4"),
        (_compress(16, "float"), None),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "none"}, None),
        ({"bits": 4}, None),
    ],
)  # fmt: skip
def test_formats_are_read(entry: dict[str, object], name: str | None) -> None:
    found = find_weight_format(build_served_model({**LLAMA, "quantization_config": entry}, "tiny"), None)
    assert (None if found is None else found.name) == name


# Bits of a weight, and of what a group of weights has together.
RATES = {
    "fp8": (8, 0), "fp8-block": (8, 32 / 128**2), "int8": (8, 0), "awq": (4, 20 / 128), "gptq": (4, 20 / 128),
    "nvfp4": (4, 8 / 16), "mxfp4": (4, 8 / 32), "bitsandbytes": (4, 32 / 64), "gptq8": (8, 24 / 128),
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
def test_bytes_of_a_quantized_weight(name: str) -> None:
    found = find_weight_format(build_served_model(LLAMA, "tiny"), name)
    assert found == WeightFormat(name, sum(RATES[name]) / 8)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="does not know this format"):
        find_weight_format(build_served_model(LLAMA, "tiny"), "q2")


def test_quantization_leaves_embeddings_alone() -> None:
    model = build_served_model(LLAMA, "tiny")
    plain = count_weight_bytes(model, None, 1, HOPPER)
    linear = sum(part.count * part.copies for part in list_parts(model) if part.block)
    quantized = count_weight_bytes(model, WeightFormat("fp8", 1.0), 1, HOPPER)
    assert plain - quantized == linear


@pytest.mark.parametrize(
    ("name", "family", "quantization"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama", "fp8"),
        ("Qwen/Qwen3-8B-AWQ", "qwen3", "awq"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama", "awq"),
        ("google/gemma-2-9b-it", "gemma2", None),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2", None),
        ("deepseek-ai/DeepSeek-R1", "deepseek_v3", "fp8-block"),
        ("gpt-oss-20b", "gpt_oss", "mxfp4"),
        ("moonshotai/Kimi-VL-A3B-Instruct", "deepseek_v3", None),
        ("google/gemma-4-12B-it", "gemma4_unified_text", None),
        ("Qwen/Qwen3.5-4B", "qwen3_5_text", None),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe_text", None),
    ],
)
def test_names_are_found(name: str, family: str, quantization: str | None) -> None:
    model = load_served_model(name)
    found = find_weight_format(model, None)
    assert (model.family, found.name if found else None) == (family, quantization)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown model"):
        load_served_model("no/such-model")


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(UsageError, match="does not know this kind of model"):
        load_served_model("falcon-7b")


def test_incomplete_configurations_are_refused() -> None:
    with pytest.raises(UsageError, match="incomplete"):
        build_served_model({"model_type": "llama", "hidden_size": 8}, "tiny")
