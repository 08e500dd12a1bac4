"""The model catalog: each entry, built without memory by transformers, has the size that the catalog says."""

from __future__ import annotations

import json
import re

import pytest

from memprof.errors import UsageError
from memprof.workload.catalog import ModelEntry, find_model, has_model, list_models
from tests.lanes import at_night

KEYS = [entry.key for entry in list_models()]

# Typed here a second time, from the publishers, so that a slip in the catalog's data shows.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "whisper-medium": 763_857_920,
    "whisper-large-v3": 1_543_490_560,
    "bloom-560m": 559_214_592,
    "mamba-130m": 129_135_360,
}

# The published count is of something else: (what it counts beyond the architecture class).
PUBLISHED_BEYOND = {
    "deepseek-v3": 58 * 256,  # router biases, which are buffers in transformers
    "falcon-7b": 65_024 * 4_544,  # the output head, stored although tied
    "qwen3-0.6b": 151_936 * 1_024,
    "qwen3-1.7b": 151_936 * 2_048,
    "flan-t5-base": 32_128 * 768,  # the output head, which transformers 5 ties
    "flan-t5-large": 32_128 * 1_024,
    "bert-base-uncased": 768 * 768 + 768 + 2 * 768 + 2,  # pooler and next-sentence head
    "bert-large-uncased": 1024 * 1024 + 1024 + 2 * 1024 + 2,
    "roberta-base": 514,  # position ids
}


def count_on_meta(entry: ModelEntry) -> tuple[int, set[str]]:
    """Parameters of the architecture class, and the kinds of device that they are on."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = entry.load_config()
    with torch.device("meta"):
        model = getattr(transformers, entry.architecture)(
            transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        )
    parameters = list(model.parameters())
    return sum(parameter.numel() for parameter in parameters), {parameter.device.type for parameter in parameters}


def test_there_are_enough() -> None:
    assert len(KEYS) >= 45
    assert len(set(KEYS)) == len(KEYS)


def test_the_count_is_that_of_the_architecture() -> None:
    """By day of one entry of each architecture."""
    entries = list_models() if at_night() else {entry.architecture: entry for entry in list_models()}.values()
    for entry in entries:
        assert count_on_meta(entry) == (entry.num_parameters, {"meta"}), entry.key


def test_transformers_took_the_configuration_as_it_stands() -> None:
    transformers = pytest.importorskip("transformers")
    for key in KEYS:
        stored = find_model(key).load_config()
        built = transformers.AutoConfig.for_model(stored.pop("model_type"), **stored)
        rope = getattr(built, "rope_parameters", None) or {}
        # transformers 5 moves these into rope_parameters, and ties every T5 (see the note of flan-t5-base).
        scaling = stored.pop("rope_scaling", {})
        assert {name: rope.get(name) for name in scaling} == scaling
        for name, moved in (
            ("rope_theta", "rope_theta"),
            ("rotary_emb_base", "rope_theta"),
            ("rotary_pct", "partial_rotary_factor"),
            ("partial_rotary_factor", "partial_rotary_factor"),
        ):
            if name in stored:
                assert rope[moved] == stored.pop(name)
        if key.startswith("flan-t5"):
            assert stored.pop("tie_word_embeddings") is False
            assert built.scale_decoder_outputs is False
        dtype = stored.pop("dtype")
        assert str(built.dtype).removeprefix("torch.") == dtype
        stored.pop("num_global_key_value_heads", None)  # of Gemma 4: kept layer by layer, and part of the count
        values = built.to_dict()  # of Gemma 4, some attributes are read layer by layer alone
        assert {name: values[name] if name in values else getattr(built, name) for name in stored} == stored


def test_an_entry_agrees_with_its_configuration() -> None:
    for key in KEYS:
        entry = find_model(key)
        config = entry.load_config()
        assert config["architectures"] == [entry.architecture]
        assert config["dtype"] == entry.checkpoint_dtype
        assert config.get("vocab_size") == entry.vocab_size
        assert isinstance(config["tie_word_embeddings"], bool)
        assert entry.task in ("causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "speech-seq2seq")
        assert entry.sources
        assert not entry.synthesized
        assert (entry.published_parameters is None) == (entry.published_source == "")
        if "max_position_embeddings" in config and "roberta" not in entry.key:
            assert entry.max_positions == config["max_position_embeddings"]


def test_the_layers_alternate_as_many_times_as_there_are_layers() -> None:
    for key in KEYS:
        config = find_model(key).load_config()
        if "layer_types" in config:
            assert len(config["layer_types"]) == config["num_hidden_layers"]
            assert {"sliding_attention", "full_attention"} == set(config["layer_types"])


def test_the_count_is_the_published_one() -> None:
    for key in PUBLISHED:
        assert find_model(key).num_parameters == PUBLISHED[key]
        assert find_model(key).published_parameters == PUBLISHED[key]


@pytest.mark.parametrize("key", PUBLISHED_BEYOND)
def test_a_published_count_of_more_differs_by_what_it_counts(key: str) -> None:
    entry = find_model(key)
    assert entry.published_parameters == entry.num_parameters + PUBLISHED_BEYOND[key]


def test_a_difference_from_the_published_count_is_explained() -> None:
    for key in KEYS:
        entry = find_model(key)
        if entry.published_parameters not in (None, entry.num_parameters):
            assert entry.note


def test_the_name_says_the_size() -> None:
    for key in KEYS:
        match = re.search(r"(?<![\dx])(\d+(?:\.\d+)?)([mb])(?:$|-)", key)
        if match and not key.startswith(("mixtral", "gemma-4-e")):  # E2B: effective parameters
            named = float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]]
            # Llama 3.2 1B has 1.24B, gemma-2-2b 2.6B and OLMo 2 1B 1.48B.
            assert 0.94 < find_model(key).num_parameters / named < 1.49


def test_names_lead_to_one_model() -> None:
    from memprof.workload.catalog.models import _fold_name

    owners: dict[str, str] = {}
    for entry in list_models():
        names = (entry.key, entry.hf_id, entry.hf_id.rpartition("/")[2], *entry.aliases)
        for name in {_fold_name(name) for name in names}:
            assert owners.setdefault(name, entry.key) == entry.key, name
            assert find_model(name) is entry


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gpt2", "gpt2"),
        ("openai-community/gpt2", "gpt2"),
        ("META-LLAMA/llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("Qwen3-4B", "qwen3-4b"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("google/vit-base-patch16-224", "vit-base"),
    ],
)
def test_find_model_knows_the_ways_people_write(name: str, key: str) -> None:
    assert has_model(name)
    assert find_model(name).key == key


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        find_model("lama-3.1-8b")
    assert "'llama-3.1-8b'" in str(caught.value)
    assert not has_model("lama-3.1-8b")
    assert not has_model("")


def test_a_configuration_may_be_changed() -> None:
    config = find_model("llama-3.2-1b").load_config()
    config["rope_scaling"]["factor"] = -1.0
    config.pop("model_type")
    again = find_model("llama-3.2-1b").load_config()
    assert again["rope_scaling"]["factor"] == 32.0
    assert again["model_type"] == "llama"


def test_dropouts_of_gpt2_are_kept() -> None:
    """They change the memory of training, and their default is not zero."""
    config = find_model("gpt2").load_config()
    assert (config["attn_pdrop"], config["embd_pdrop"], config["resid_pdrop"]) == (0.1, 0.1, 0.1)


def test_a_configuration_nested_without_end_is_one_error(tmp_path):
    from memprof.errors import UsageError
    from memprof.workload.catalog.models import read_config_file

    (tmp_path / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UsageError, match="cannot read the configuration"):
        read_config_file(tmp_path)


@pytest.mark.parametrize(
    ("key", "most"),
    [("num_hidden_layers", 10_000), ("n_layer", 10_000), ("hidden_size", 2**31 - 1), ("ffn_dim", 2**31 - 1)],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, key, most):
    from memprof.errors import UsageError
    from memprof.workload.catalog.models import read_config_file

    file = tmp_path / "config.json"
    for size in (1, most, [2, most]):
        file.write_text(json.dumps({"model_type": "llama", key: size}))
        assert read_config_file(file)[1][key] == size
    for size in (0, most + 1, 10**18, -1, 1.5, True, "2", [], [2, most + 1]):
        file.write_text(json.dumps({"model_type": "llama", key: size}))
        with pytest.raises(UsageError, match="the configuration is wrong") as refused:
            read_config_file(file)
        assert f"{key} is {size!r}" in str(refused.value) and f"from 1 to {most:,}" in str(refused.value)
