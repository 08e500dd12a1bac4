"""Configurations with wrong entries: a model or one error, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.errors import MemprofError, UsageError
from memprof.estimate.geometry import build_from_config
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from tests.lanes import examples

_SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 32, "torch_dtype": "bfloat16",
}  # fmt: skip
BASES: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **_SMALL},
    {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, **_SMALL},
    {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 2, "sliding_window": 16, **_SMALL},
]
ABSENT = ("quantization_config", "auto_map", "rope_scaling", "rope_parameters", "tie_word_embeddings", "dtype")
WRONG = [
    None, True, -1, 0, 1, 3, 2**31, 2**70, 0.5, float("nan"), "", "x", [], {}, [[]], [None], [7], {"a": 1}, "9" * 500,
    "bfloat16",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_entry_ends_in_a_traceback(tmp_path, data) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(BASES)))
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*config, *ABSENT]))
        config[key] = data.draw(st.sampled_from(WRONG))
    if data.draw(st.booleans()):
        config.pop(data.draw(st.sampled_from([*config])))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with contextlib.suppress(MemprofError), torch.device("meta"):
        find_source(TargetSpec(model=str(file))).build()
    with contextlib.suppress(MemprofError):
        build_from_config(file)


@pytest.mark.parametrize("entry", [{}, {"vocab_size": None}], ids=["left out", "null"])
def test_a_vocabulary_cannot_be_replaced_where_there_is_none(tmp_path, entry) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "wav2vec2-bert", "architectures": ["Wav2Vec2BertForCTC"], **entry}))
    with pytest.raises(UsageError, match="no vocabulary"):
        find_source(TargetSpec(model=str(file), vocab_size=300))
