import json

import pytest

from memprof.errors import UsageError
from memprof.estimate.geometry import FAMILIES, build_from_config, build_from_model, build_from_params, build_from_size
from memprof.workload.catalog import list_models

KNOWN = [entry.key for entry in list_models() if build_from_model(entry.key).geometry is not None]


def test_most_decoders_of_the_catalog_are_known():
    assert len(KNOWN) >= 55
    assert {build_from_model(key).geometry.family for key in KNOWN} == set(FAMILIES)


@pytest.mark.parametrize("key", KNOWN)
def test_every_parameter_is_counted(key):
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
    assert f"{subject.geometry.hidden:,}" in subject.rule


def test_a_size_is_the_published_model():
    assert build_from_size("8B").name == "llama-3.1-8b"


def test_a_configuration_is_the_catalog_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(build_from_model("qwen3-4b").config)))
    subject = build_from_config(tmp_path)
    assert subject.geometry == build_from_model("qwen3-4b").geometry
    assert build_from_model(str(path)).num_parameters == subject.num_parameters


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
