"""The dimensions of a model in a configuration, and the model, batch and length in a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.doctor.dimensions import Dimensions, find_batch_size, find_dimensions, find_model_name, find_seq_length
from memprof.errors import UsageError


def dimensions(folder: Path, **config: object) -> Dimensions:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return find_dimensions(str(path))


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (["hidden_size", "n_embd", "d_model", "dim"], "hidden"),
        (["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], "heads"),
        (["intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim"], "intermediate"),
        (["vocab_size"], "vocabulary"),
        (["num_key_value_heads", "num_kv_heads"], "kv_heads"),
        (["head_dim", "d_kv"], "head_dim"),
        (["num_experts", "num_local_experts", "n_routed_experts"], "num_experts"),
        (["moe_intermediate_size", "intermediate_size"], "expert_width"),
        (["max_position_embeddings", "n_positions"], "max_positions"),
    ],
)
def test_names_of_a_dimension(tmp_path: Path, names: list[str], field: str):
    for name in names:
        assert getattr(dimensions(tmp_path, **{name: 77}), field) == 77
    assert getattr(dimensions(tmp_path, **{name: 70 + i for i, name in enumerate(names)}), field) == 70


def test_dimensions_that_follow_from_others(tmp_path: Path):
    found = dimensions(tmp_path, hidden_size=640, num_attention_heads=10)
    assert (found.intermediate, found.head_dim, found.kv_heads) == (2560, 64, 10)
    assert (found.vocabulary, found.num_experts, found.max_positions, found.num_parameters) == (0, 0, None, 0)
    assert dimensions(tmp_path, hidden_size=640).head_dim == 0


@pytest.mark.parametrize("value", [0, -1, True, "77", 77.0, None, [77]])
def test_what_is_no_dimension(tmp_path: Path, value: object):
    assert dimensions(tmp_path, n_embd=1, hidden_size=value).hidden == 1
    assert dimensions(tmp_path, hidden_size=value).hidden == 0


def test_one_key_head_for_all_queries(tmp_path: Path):
    sizes = {"num_attention_heads": 71, "num_kv_heads": 8}
    assert dimensions(tmp_path, multi_query=True, **sizes).kv_heads == 1
    assert dimensions(tmp_path, multi_query=False, **sizes).kv_heads == 8
    assert dimensions(tmp_path, multi_query=True, new_decoder_architecture=True, **sizes).kv_heads == 8


@pytest.mark.parametrize(
    ("config", "half_dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_half_precision_of_a_checkpoint(tmp_path: Path, config: dict[str, str], half_dtype: str):
    assert dimensions(tmp_path, **config).half_dtype == half_dtype


def test_the_text_model_of_several(tmp_path: Path):
    found = dimensions(tmp_path, hidden_size=1, vocab_size=9, text_config={"hidden_size": 640})
    assert (found.hidden, found.vocabulary, found.model) == (640, 9, str(tmp_path / "config.json"))
    assert dimensions(tmp_path, hidden_size=1, text_config="llama").hidden == 1


@pytest.mark.parametrize(
    ("name", "vocabulary", "max_positions", "num_parameters", "half_dtype"),
    [
        ("qwen3-4b", 151_936, 40_960, 4_022_468_096, "bfloat16"),
        ("opt-125m", 50_272, 2048, 125_239_296, "float16"),
        ("vit-base", 0, 197, 86_567_656, "bfloat16"),
    ],
)
def test_a_model_of_the_catalog(name: str, vocabulary: int, max_positions: int, num_parameters: int, half_dtype: str):
    found = find_dimensions(name)
    assert (found.vocabulary, found.max_positions, found.num_parameters) == (vocabulary, max_positions, num_parameters)
    assert (found.model, found.half_dtype) == (name, half_dtype)


def test_a_name_of_the_catalog_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "qwen3-4b").mkdir()
    (tmp_path / "qwen3-4b" / "config.json").write_text('{"hidden_size": 1}')
    monkeypatch.chdir(tmp_path)
    assert find_dimensions("qwen3-4b").hidden == 2560


@pytest.mark.parametrize("text", ["[]", "{", "null", '""'])
def test_what_is_no_configuration(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError) as refused:
        find_dimensions(str(tmp_path))
    assert refused.value.value == str(tmp_path)
    assert refused.value.hint


def test_what_is_neither_a_file_nor_in_the_catalog():
    with pytest.raises(UsageError, match="unknown model"):
        find_dimensions("no/such/model")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("base_model: Qwen/Qwen3-4B", "qwen3-4b"),
        ("AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-4B')", "qwen3-4b"),
        ("loading Qwen/Qwen3-4B.", "qwen3-4b"),
        ("--model /models/Qwen3-4B/", "qwen3-4b"),
        ("--model meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("--model unsloth/Qwen3-4B-Base-unsloth-bnb-4bit", "qwen3-4b"),  # three suffixes
        ("--model none --model_id Qwen/Qwen3-4B", "qwen3-4b"),
        ("--model a/b", None),
        ("", None),
    ],
)
def test_a_model_in_a_log(text: str, key: str | None):
    assert find_model_name(text) == key


@pytest.mark.parametrize(
    ("text", "batch_size"),
    [
        ("--per_device_train_batch_size 8", 8),
        ("micro_batch_size=4", 4),
        ('"train_micro_batch_size_per_gpu": 2', 2),
        ("--batch-size 1", 1),
        ("--batch_size=1048575", 1_048_575),
        ("--batch_size 1048576", None),
        ("--batch_size 0", None),
        ("batch 8", None),
    ],
)
def test_the_batch_size_in_a_log(text: str, batch_size: int | None):
    assert find_batch_size(text) == batch_size


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("--max_seq_length 4096", 4096),
        ("max_seq_len: 512", 512),
        ("cutoff_len=2", 2),
        ("block_size = 16777215", 16_777_215),
        ("block_size = 16777216", None),
        ("max_length=1", None),
        ("context_length: many", None),
    ],
)
def test_the_length_in_a_log(text: str, length: int | None):
    assert find_seq_length(text) == length
