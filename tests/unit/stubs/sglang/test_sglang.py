"""SGLang's own code starts engines of tiny models on virtual GPUs. By hand: weights and KV cache, of the shapes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed (memprof help serving)"
    ),
]
HIDDEN, LAYERS, HEADS, KEY_HEADS, MIDDLE, VOCABULARY, HEAD = 512, 2, 4, 2, 1024, 1024, 128
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE, "max_position_embeddings": 4096, "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS, "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": VOCABULARY, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
QWEN3_MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": HEAD, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
LAYER_WEIGHTS = (
    (HEADS + 2 * KEY_HEADS) * HEAD * (HIDDEN + 1)  # queries, keys and values, with a bias
    + HEADS * HEAD * HIDDEN
    + 3 * HIDDEN * MIDDLE
    + 2 * HIDDEN  # norms
)
WEIGHTS_BYTES = 2 * (LAYERS * LAYER_WEIGHTS + 2 * VOCABULARY * HIDDEN + HIDDEN)
BYTES_PER_TOKEN = 2 * LAYERS * KEY_HEADS * HEAD * 2
EAGER = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")


@pytest.fixture
def start(tmp_path: Path):
    """Return the engine of the JSON report of a server of `config`, whose run ends with exit code `code`."""

    def run(config: dict[str, Any], *options: str, gpu: str = "rtx-4090", code: int = 0) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        server = ("python", "-m", "sglang.launch_server", "--model-path", str(tmp_path), "--context-length", "512")
        command = [sys.executable, "-m", "memprof", "run", "--gpu", gpu, "--json", *server, *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert result.returncode == code, result.stderr[-3000:]
        engine: dict[str, Any] = json.loads(result.stdout)["engine"]
        assert engine["engine"] == "sglang" and engine["context_length"] == 512
        return engine

    return run


def test_the_cache_is_what_the_fraction_leaves(start):
    engine = start(QWEN2, *EAGER, "--mem-fraction-static", "0.5")
    free = engine["total_bytes"] - engine["outside_torch_bytes"]
    assert WEIGHTS_BYTES <= engine["weights_bytes"] < WEIGHTS_BYTES + (24 << 20)  # segments, with the rotary table
    assert engine["kv_cache_bytes"] == pytest.approx(free * 0.5 - engine["weights_bytes"], abs=2 << 20)
    assert engine["num_tokens"] == pytest.approx(engine["kv_cache_bytes"] / BYTES_PER_TOKEN, rel=1e-3)
    assert engine["graph_taken_bytes"] is None


def test_experts_with_cuda_graphs(start):
    engine = start(QWEN3_MOE, "--cuda-graph-max-bs", "8")
    assert engine["num_tokens"] > 0 and engine["graph_taken_bytes"] > 0


def test_two_ranks_on_hopper_share_the_weights(start):
    engine = start(QWEN2, *EAGER, "--tp", "2", gpu="h100-80gb")
    assert engine["tensor_parallel"] == 2
    assert WEIGHTS_BYTES / 2 <= engine["weights_bytes"] < WEIGHTS_BYTES / 2 + (24 << 20)


def test_the_engine_refuses_a_fraction_that_is_too_small(start):
    engine = start(QWEN2, *EAGER, "--mem-fraction-static", "0.0001", code=3)
    assert engine["refusal"].startswith("Not enough memory")
