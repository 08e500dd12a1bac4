"""Memory of the slots that vLLM allocates for LoRA adapters when it loads a model, whether or not they are used.

Each linear layer has `max_loras` pairs of matrices of rank `max_lora_rank` in the model's dtype
(vllm/lora/layers/base_linear.py and column_parallel_linear.py, create_lora_weights, 0.11 to 0.33; not sharded fully).
"""

from __future__ import annotations

from collections.abc import Iterator

from memprof.errors import UsageError
from memprof.estimate.serving.model import ITEMSIZE, ServedModel
from memprof.estimate.serving.weights import VOCABULARY_PADDING
from memprof.units import round_up

DEFAULT_RANK = 16  # vllm/config/lora.py, max_lora_rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Families whose embedding and output head have slots, too: `embedding_modules` in vllm/model_executor/models/.
_FAMILIES_WITH_VOCABULARY = ("llama", "qwen3", "granite")


def count_lora_bytes(model: ServedModel, max_loras: int, rank: int, tensor_parallel: int) -> int:
    """Return the bytes of all slots on one rank of tensor parallelism.

    Raises UsageError: vLLM has no such rank, or the model's layers are not only attention and MLP.
    """
    if rank not in RANKS:
        ranks = ", ".join(map(str, RANKS))
        raise UsageError("vLLM has no such --max-lora-rank", value=f"--lora-rank {rank}", hint=f"give one of {ranks}")
    if model.experts or model.latent or model.is_hybrid or model.images or model.global_geometry:
        hint = "leave out --max-loras"
        raise UsageError("adapters' slots are known for plain decoders alone", value=model.name, hint=hint)
    rows = sum(_list_rows(model, tensor_parallel)) * model.geometry.layers
    if model.family in _FAMILIES_WITH_VOCABULARY:
        g = model.geometry
        rows += 2 * (round_up(g.vocab, VOCABULARY_PADDING) + g.hidden)
    return max_loras * rank * rows * ITEMSIZE


def _list_rows(model: ServedModel, tensor_parallel: int) -> Iterator[int]:
    """Yield input plus output width of each matrix of a layer: inputs of columns that are divided are whole, and so are
    outputs of rows that are divided."""
    g, tp = model.geometry, tensor_parallel
    queries, keys = g.heads // tp * g.head_dim, max(1, g.kv_heads // tp) * g.head_dim
    yield from (g.hidden + queries, g.hidden + keys, g.hidden + keys)
    yield queries + g.hidden
    ups = 2 if g.is_gated else 1
    yield ups * (g.hidden + g.intermediate // tp)
    yield g.intermediate // tp + g.hidden
