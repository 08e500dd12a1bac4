"""vLLM's own code starts engines of tiny models on virtual GPUs. By hand: weights and KV cache, of the shapes."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (memprof help serving)"),
]
HIDDEN, LAYERS, HEADS, KEY_HEADS, MIDDLE, VOCABULARY = 256, 2, 4, 2, 512, 1024
HEAD = HIDDEN // HEADS
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
    + HIDDEN * HIDDEN
    + 3 * HIDDEN * MIDDLE
    + 2 * HIDDEN  # norms
)
WEIGHTS_BYTES = 2 * (LAYERS * LAYER_WEIGHTS + 2 * VOCABULARY * HIDDEN + HIDDEN)
BYTES_PER_TOKEN = 2 * LAYERS * KEY_HEADS * HEAD * 2


@pytest.fixture
def write_model(tmp_path: Path):
    def write(config: dict[str, Any]) -> str:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


def run(tmp_path: Path, *arguments: str, gpu: str = "rtx-4090", code: int = 0) -> dict[str, Any]:
    """Return the JSON report of `memprof run`, which ends with exit code `code`."""
    command = [sys.executable, "-m", "memprof", "run", "--gpu", gpu, "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert result.returncode == code, result.stderr[-3000:]
    return json.loads(result.stdout)


def check_cache(engine: dict[str, Any]) -> None:
    """Check that the KV cache is what the other parts leave, and how many tokens it holds."""
    budget = math.ceil(engine["total_bytes"] * engine["utilization"])
    parts = ("weights_bytes", "outside_torch_bytes", "buffers_bytes", "profile_peak_bytes", "graph_bytes")
    assert engine["kv_cache_bytes"] == budget - sum(engine[part] or 0 for part in parts)
    assert engine["num_tokens"] == engine["num_blocks"] * engine["block_size"]


def test_a_script_that_makes_an_llm(write_model, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(
        "from vllm import LLM\n"
        f"LLM({write_model(QWEN2)!r}, enforce_eager=True, gpu_memory_utilization=0.5, max_model_len=1024)\n"
        "raise SystemExit('the script is not stopped')\n"
    )
    report = run(tmp_path, str(script))
    engine = report["engine"]
    assert report["program"]["ended"] == "ready"
    assert engine["utilization"] == 0.5 and engine["context_length"] == 1024
    assert WEIGHTS_BYTES <= engine["weights_bytes"] < WEIGHTS_BYTES + (4 << 20)  # with the rotary table
    check_cache(engine)
    assert engine["num_tokens"] == engine["kv_cache_bytes"] // (16 * BYTES_PER_TOKEN) * 16


def test_serve(write_model, tmp_path):
    engine = run(tmp_path, "vllm", "serve", write_model(QWEN3_MOE), "--max-model-len", "512", "--enforce-eager")[
        "engine"
    ]
    assert engine["engine"] == "vllm" and engine["context_length"] == 512
    check_cache(engine)


def test_serve_compiled_with_cuda_graphs(write_model, tmp_path):
    engine = run(tmp_path, "vllm", "serve", write_model(QWEN2), "--max-model-len", "512")["engine"]
    assert engine["graph_taken_bytes"] > 0
    check_cache(engine)


def test_two_ranks_share_the_weights(write_model, tmp_path):
    options = ("--max-model-len", "512", "--enforce-eager", "--tensor-parallel-size", "2")
    engine = run(tmp_path, "vllm", "serve", write_model(QWEN2), *options, gpu="h100-80gb")["engine"]
    assert engine["tensor_parallel"] == 2
    assert WEIGHTS_BYTES / 2 <= engine["weights_bytes"] < WEIGHTS_BYTES / 2 + (4 << 20)


def test_the_engine_refuses_a_context_that_is_too_long(write_model, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(
        "from vllm import LLM\n"
        f"LLM({write_model(QWEN2)!r}, enforce_eager=True, max_model_len=4096, kv_cache_memory_bytes={1 << 20})\n"
    )
    report = run(tmp_path, str(script), code=3)
    assert "4096" in report["engine"]["refusal"]


def test_two_ranks_together_and_the_whole_report(write_model, tmp_path):
    model = write_model(QWEN2)
    options = ("--max-model-len", "512", "--enforce-eager", "--tensor-parallel-size", "2")
    command = [sys.executable, "-m", "memprof", "run", "--ranks", "all", "--full", "vllm", "serve", model, *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    text = " ".join(result.stdout.split())
    assert "stopped when its engine was ready" in text
    assert "one of the GPUs, by the engine's own code" in text
