import json

import pytest

from memprof.errors import UsageError
from memprof.estimate.geometry import (
    FAMILIES,
    DecoderGeometry,
    build_from_config,
    build_from_model,
    build_from_params,
    build_from_size,
    read_geometry,
)
from memprof.workload.catalog import list_models
from tests.unit.estimate.tiny import TINY

KNOWN = [entry.key for entry in list_models() if build_from_model(entry.key).geometry is not None]


def test_most_decoders_of_the_catalog_are_known():
    assert len(KNOWN) >= 55
    assert {build_from_model(key).geometry.family for key in KNOWN} == set(FAMILIES)


def test_every_parameter_is_counted():
    for key in KNOWN:
        subject = build_from_model(key)
        assert subject.geometry.num_parameters == subject.num_parameters


@pytest.mark.parametrize("key", ["mixtral-8x7b", "bert-base-uncased", "mamba-130m", "whisper-tiny"])
def test_others_have_no_geometry_and_say_why(key):
    subject = build_from_model(key)
    assert subject.geometry is None
    assert subject.geometry_error


def test_a_number_of_parameters_is_kept_and_its_shape_is_near():
    subject = build_from_params("1.2B")
    assert subject.num_parameters == 1_200_000_000
    assert subject.is_derived
    assert abs(subject.geometry.num_parameters / 1.2e9 - 1) < 0.02
    assert (
        "15 layers, hidden size 2,048, 32 heads of 64 (8 for keys and values), intermediate size 8,448, vocabulary "
        "128,256: 1,198,585,856 parameters. Weights, gradients and optimizer state are of the 1,200,000,000 given"
    ) in subject.rule
    assert (subject.name, subject.checkpoint_dtype, subject.origin) == ("1.2B parameters", "bfloat16", "params")
    assert subject.config["num_hidden_layers"] == 15


def test_a_size_is_the_published_model():
    assert build_from_size("8B").name == "llama-3.1-8b"


def test_a_configuration_is_the_catalog_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(build_from_model("qwen3-4b").config)))
    subject = build_from_config(tmp_path)
    assert subject.geometry == build_from_model("qwen3-4b").geometry
    assert build_from_model(str(path)).num_parameters == subject.num_parameters
    assert (subject.origin, subject.path, subject.name) == ("config", str(path), tmp_path.name)
    for dtype in ({"dtype": "float16"}, {"torch_dtype": "float16"}, {}):
        config = {name: value for name, value in subject.config.items() if "dtype" not in name}
        path.write_text(json.dumps(config | dtype))
        assert build_from_config(path).checkpoint_dtype == ("float16" if dtype else "float32")


GOOD = dict(build_from_model("llama-3.2-1b").config)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot read"),
        ("[]", "not a model configuration"),
        ("{}", "not a model configuration"),
        (json.dumps({"model_type": 3}), "not a model configuration"),
        (json.dumps({"model_type": "mamba"}), "does not know this kind"),
        (json.dumps({**GOOD, "hidden_size": "2048"}), "configuration is wrong"),
        (json.dumps({**GOOD, "hidden_size": -1}), "configuration is wrong"),
        (json.dumps({**GOOD, "num_attention_heads": 0}), "configuration is wrong"),
        (json.dumps({**GOOD, "num_key_value_heads": "8"}), "configuration is wrong"),
        (json.dumps({**GOOD, "num_hidden_layers": True}), "configuration is wrong"),
        (json.dumps({**GOOD, "num_hidden_layers": 10_001}), "configuration is wrong"),
        (json.dumps({**GOOD, "head_dim": 2**31}), "configuration is wrong"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "vocab_size"}), "incomplete or wrong"),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path, text, problem):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        build_from_config(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        build_from_config(path)


def test_nothing_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        build_from_config(tmp_path)


CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "intermediate_size": 192, "max_position_embeddings": 77,
}  # fmt: skip
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 77}
NEW = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
LAYER_NORM = {"is_gated": False, "norm": "layer", "has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True}


SHAPES = [
        ("llama", CONFIG, {}),
        ("llama", CONFIG | {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "tie_word_embeddings": True},
         {"has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True, "head_dim": 8, "tied": True}),
        ("mistral", CONFIG | {"sliding_window": 5}, {"window": 5}),
        ("qwen2", CONFIG | {"sliding_window": 5, "use_sliding_window": False}, {"has_qkv_bias": True}),
        ("qwen3", CONFIG, {"qk_norm": "head"}),
        ("gemma2", CONFIG | {"sliding_window": 5, "final_logit_softcapping": 30.0},
         {"norm": "gemma", "num_norms": 4, "activation": "gelu", "window": 5, "has_softcap": True, "tied": True}),
        ("gemma3_text", CONFIG | {"sliding_window": 5},
         {"norm": "gemma", "num_norms": 4, "qk_norm": "head", "activation": "gelu", "window": 5, "global_interval": 6,
          "tied": True}),
        ("gemma3_text", CONFIG | {"sliding_window_pattern": 2, "tie_word_embeddings": False},
         {"norm": "gemma", "num_norms": 4, "qk_norm": "head", "activation": "gelu", "global_interval": 2}),
        ("phi3", CONFIG | {"partial_rotary_factor": 0.75},
         {"has_fused_qkv": True, "has_fused_gate_up": True, "rotary_fraction": 0.75}),
        ("olmo2", CONFIG, {"norm": "olmo", "qk_norm": "hidden"}),
        ("gpt2", OLD, {**LAYER_NORM, "kv_heads": 4, "intermediate": 256, "rotary_fraction": 0.0, "has_fused_qkv": True,
                       "num_positions": 77, "activation": "gelu", "has_dropout": True, "tied": True}),
        ("gpt2", OLD | {"n_inner": 100, "resid_pdrop": 0.0, "activation_function": "gelu_new"},
         {**LAYER_NORM, "kv_heads": 4, "intermediate": 100, "rotary_fraction": 0.0, "has_fused_qkv": True,
          "num_positions": 77, "activation": "gelu-python", "tied": True}),
        ("opt", NEW | {"ffn_dim": 100, "activation_function": "relu"},
         {**LAYER_NORM, "kv_heads": 4, "intermediate": 100, "rotary_fraction": 0.0, "num_positions": 79,
          "activation": "relu", "has_dropout": True, "tied": True}),
        ("opt", NEW | {"ffn_dim": 100, "activation_function": "relu", "dropout": 0.0},
         {**LAYER_NORM, "kv_heads": 4, "intermediate": 100, "rotary_fraction": 0.0, "num_positions": 79,
          "activation": "relu", "tied": True}),
        ("gpt_neox", NEW | {"hidden_act": "gelu"},
         {**LAYER_NORM, "kv_heads": 4, "rotary_fraction": 0.25, "has_fused_qkv": True, "activation": "gelu"}),
        ("gpt_neox", NEW | {"rotary_pct": 0.5, "attention_bias": False, "hidden_dropout": 0.1},
         {**LAYER_NORM, "kv_heads": 4, "rotary_fraction": 0.5, "has_fused_qkv": True, "activation": "gelu",
          "has_qkv_bias": False, "has_o_bias": False, "has_dropout": True}),
        ("gpt_neox", NEW | {"rope_parameters": {"partial_rotary_factor": 0.75}},
         {**LAYER_NORM, "kv_heads": 4, "rotary_fraction": 0.75, "has_fused_qkv": True, "activation": "gelu"}),
        ("phi", NEW | {"hidden_act": "gelu_new", "resid_pdrop": 0.1, "partial_rotary_factor": 0.4},
         {**LAYER_NORM, "kv_heads": 4, "rotary_fraction": 0.4, "num_norms": 1, "has_head_bias": True,
          "activation": "gelu-python", "has_dropout": True}),
        ("phi", NEW | {"hidden_act": "gelu_new"},
         {**LAYER_NORM, "kv_heads": 4, "rotary_fraction": 0.5, "num_norms": 1, "has_head_bias": True,
          "activation": "gelu-python"}),
    ]  # fmt: skip


def test_the_shape_in_a_configuration():
    for family, config, expected in SHAPES:
        shape = {name: getattr(TINY, name) for name in TINY.__slots__} | {"max_positions": 77} | expected
        assert read_geometry({"model_type": family, **config}) == DecoderGeometry(**{**shape, "family": family})


@pytest.mark.parametrize(
    ("model", "targets", "matrices"),
    [
        ("llama-3.2-1b", None, ("q", "v")),
        ("llama-3.2-1b", "self_attn.q_proj, mlp.down_proj", ("q", "down")),
        ("gpt2", None, ("qkv",)),
        ("gpt2", "c_proj", ("o", "down")),  # two modules have the name
        ("gpt2", "c_fc", ("up",)),
        ("pythia-70m", None, ("qkv",)),
        ("pythia-70m", "dense,dense_h_to_4h,dense_4h_to_h", ("o", "up", "down")),
        ("phi-2", None, ("q", "v", "up", "down")),
        ("phi-3-mini", None, ("qkv",)),
        ("phi-3-mini", "gate_up_proj", ("up",)),
        ("opt-125m", "out_proj,fc1,fc2", ("o", "up", "down")),
        ("qwen3-0.6b", "all-linear", ("q", "k", "v", "o", "gate", "up", "down")),
    ],
)
def test_matrices_that_lora_adapts(model, targets, matrices):
    assert build_from_model(model).geometry.resolve_lora_targets(targets) == matrices


def test_a_module_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="unknown --lora-targets") as refused:
        TINY.resolve_lora_targets("q_proj,k_prj")
    assert refused.value.hint == "did you mean 'k_proj'?"
    with pytest.raises(UsageError, match=r"known: all-linear, down_proj, .*, v_proj"):
        TINY.resolve_lora_targets("c_attn")
