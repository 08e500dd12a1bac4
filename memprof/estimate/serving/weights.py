"""Weights of a served model on one rank of tensor parallelism, by how vLLM fuses, divides and quantizes them.

Columns of the query, key, value, gate and up projections, rows of the output and down projections, and the vocabulary
are divided; norms and routers are on every rank; a key head is on several ranks if there are fewer than ranks
(vllm/model_executor/layers/linear.py, QKVParallelLinear; vocab_parallel_embedding.py, 0.19 and 0.33).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memprof.errors import UsageError
from memprof.estimate.geometry import DecoderGeometry
from memprof.estimate.serving.model import ITEMSIZE, Experts, Latent, ServedModel
from memprof.estimate.serving.unquantized import BLOCKS, compute_kept_shares
from memprof.units import MIB, round_up

VOCABULARY_PADDING = 64  # vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE.


@dataclass(frozen=True, slots=True)
class Part:
    """Equal tensors of parameters that one rank has."""

    name: str
    count: int  # Elements of one tensor.
    copies: int = 1
    block: str = (
        ""  # Of a matrix of a linear layer or of experts, which quantization makes smaller: what it belongs to.
    )


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantized matrices: bytes per weight, scales included."""

    name: str
    bytes_per_weight: float
    kept: Mapping[str, float] = field(default_factory=dict)  # By block: the share of its layers that is not quantized.


# Bits of a weight, and bits of scales and zeros over the weights of a group. fp8: one scale for a row or matrix, or a
# float32 for a block of 128 x 128; awq, gptq: groups of 128 with a scale in half precision and a zero; nvfp4: a byte
# for 16; mxfp4: a byte for 32; bitsandbytes: a float32 for 64.
_BYTES_PER_WEIGHT = {
    "fp8": 1.0, "fp8-block": 1 + 4 / 128**2, "int8": 1.0, "awq": (4 + 20 / 128) / 8, "gptq": (4 + 20 / 128) / 8,
    "nvfp4": (4 + 8 / 16) / 8, "mxfp4": (4 + 8 / 32) / 8, "bitsandbytes": (4 + 32 / 64) / 8,
    "gptq8": (8 + 24 / 128) / 8,
}  # fmt: skip


def find_weight_format(model: ServedModel, requested: str | None) -> WeightFormat | None:
    """Return the format of a model's weights: the requested one, else that of its configuration; None: not quantized.
    Raises UsageError: the closed form does not know it."""
    entry = model.config.get("quantization_config") or model.text.get("quantization_config")
    published = _read_format(entry)
    if requested is not None and published is not None and requested != published:
        hint = f"leave out --quantize, or name the model whose weights are not {published}"
        raise UsageError("the model's weights are quantized in another format", value=requested, hint=hint)
    name = requested or published
    if name in (None, "none"):
        return None
    if name not in _BYTES_PER_WEIGHT:
        hint = f"it knows {', '.join(_BYTES_PER_WEIGHT)}"
        raise UsageError("the closed form does not know this format of weights", value=name, hint=hint)
    kept = compute_kept_shares(entry, model.geometry.layers)
    if name == "mxfp4" and model.family == "gpt_oss":
        kept = dict.fromkeys(BLOCKS, 1.0) | {"experts": 0.0}
    return WeightFormat(name, _BYTES_PER_WEIGHT[name], kept)


def _read_format(entry: Mapping[str, Any] | None) -> str | None:
    if not entry:
        return None
    method = str(entry.get("quant_method", ""))
    if method == "gptq":
        return "gptq8" if entry.get("bits") == 8 else "gptq"
    if method == "fp8":
        return "fp8-block" if entry.get("weight_block_size") else "fp8"
    if method == "modelopt":
        return "nvfp4" if "FP4" in str(entry.get("quant_algo", "")).upper() else "fp8"
    if method == "compressed-tensors":
        return _read_compressed_format(entry)
    return method or None


def _read_compressed_format(entry: Mapping[str, Any]) -> str | None:
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UsageError("the configuration is wrong", value="config_groups", hint="make it an object of objects")
    for group in groups.values():
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
        if bits == 8:
            return "fp8" if kind == "float" else "int8"
        if bits == 4:
            return "nvfp4" if kind == "float" else "gptq"
    return None


def count_weight_bytes(
    model: ServedModel, weight_format: WeightFormat | None, tensor_parallel: int, capability: tuple[int, int],
    *, has_images: bool = True, limits_splits: bool = False,
) -> int:  # fmt: skip
    """Return the bytes of weights on one rank, on a GPU of compute capability `capability`.

    Without `has_images` the image encoder is not loaded; `limits_splits` as for `round_allocation`. Raises UsageError:
    heads cannot be divided over the ranks.
    """
    itemsize = ITEMSIZE
    total = 0
    for part in list_parts(model, tensor_parallel):
        kept = (
            round(part.copies * weight_format.kept.get(part.block, 0.0))
            if part.block and weight_format
            else part.copies
        )
        total += kept * round_allocation(part.count * itemsize, limits_splits=limits_splits)
        if weight_format is None or kept == part.copies:
            continue
        rate = weight_format.bytes_per_weight
        if part.block == "experts" and weight_format.name == "mxfp4":
            rate *= _compute_mxfp4_padding(model, tensor_parallel, capability)
        total += (part.copies - kept) * round_allocation(round(part.count * rate), limits_splits=limits_splits)
    if model.latent is not None and weight_format is not None:
        # Copies of the projection of keys and values that is absorbed into queries and output, not quantized
        # (vllm/model_executor/layers/attention/mla_attention.py, process_weights_after_loading).
        latent, heads = model.latent, model.geometry.heads // tensor_parallel
        total += model.geometry.layers * latent.kv_rank * heads * (latent.nope + latent.value) * itemsize
    if has_images and model.images is not None:
        total += model.images.num_parameters // tensor_parallel * itemsize
    return total + _count_rotary_bytes(model, itemsize)


def _compute_mxfp4_padding(model: ServedModel, tensor_parallel: int, capability: tuple[int, int]) -> float:
    """Return by how much the kernels of MXFP4 experts need larger matrices: Marlin and TRT-LLM pad the width to 128
    and the hidden size to 256 (quantization/mxfp4.py, 0.11; fused_moe/oracle/mxfp4.py, 0.33); Triton's layout on
    Hopper pads one of them to 256 (a published log of 0.11 on an H100: 13.47 GiB)."""
    experts, hidden = model.experts, model.geometry.hidden
    assert experts is not None
    width = experts.width // tensor_parallel
    if capability[0] == 9:
        return round_up(hidden, 256) / hidden
    return round_up(width, 128) * round_up(hidden, 256) / (width * hidden)


def round_allocation(num_bytes: int, *, limits_splits: bool = False) -> int:
    """Return the bytes that torch's allocator counts for a tensor: from 10 MiB on, a segment is a multiple of 2 MiB,
    and what is left of it is not split off unless it is above 1 MiB; with `limits_splits` (max_split_size_mb:20), not
    if the tensor has 20 MiB or more (c10/cuda/CUDACachingAllocator.cpp, should_split)."""
    if num_bytes < 10 * MIB:
        return round_up(num_bytes, 512)
    segment = round_up(num_bytes, 2 * MIB)
    is_whole = segment - num_bytes <= MIB or (limits_splits and num_bytes >= 20 * MIB)
    return segment if is_whole else round_up(num_bytes, 512)


def _count_rotary_bytes(model: ServedModel, itemsize: int) -> int:
    """Return the bytes of the tables of cosines and sines, one for each kind of layer; linear scaling makes a table
    longer by its factor (vllm/model_executor/layers/rotary_embedding/linear_scaling_rope.py)."""
    g, text = model.geometry, model.text
    if g.num_positions or model.family == "nemotron_h":
        return 0
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    fraction = float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0)
    if model.family in ("phi", "gpt_neox"):
        fraction = g.rotary_fraction
    width = model.latent.rope if model.latent else int(g.head_dim * fraction)
    rows = model.max_positions * width
    if model.family.startswith(("gemma3", "gemma4")):
        full = rope.get("full_attention") or {}
        factor = int(full.get("factor") or 1) if full.get("rope_type") == "linear" else 1
        full_width = model.global_geometry[0] if model.global_geometry else width
        rows += model.max_positions * full_width * factor
    return rows * itemsize


def list_parts(model: ServedModel, tensor_parallel: int = 1) -> Iterator[Part]:
    """Yield the parameters of one rank. Raises UsageError: the query heads cannot be divided over the ranks."""
    g, tp = model.geometry, tensor_parallel
    if g.heads % tp:
        problem = f"{model.name} has {g.heads} attention heads, which this number of GPUs does not divide"
        raise UsageError(problem, value=f"--gpus {tp}", hint="give a divisor of the heads")
    vocabulary = round_up(g.vocab, VOCABULARY_PADDING) // tp * g.hidden
    yield Part("embedding", vocabulary)
    if not g.tied:
        yield Part("output head", vocabulary)
    if g.has_head_bias:
        yield Part("output head's bias", round_up(g.vocab, VOCABULARY_PADDING) // tp)
    if g.num_positions:
        yield Part("positions", g.num_positions * g.hidden)
    yield from _list_attention_parts(model, tp)
    yield from _list_mlp_parts(model, tp)
    if model.experts is not None:
        yield from _list_expert_parts(model, model.experts, tp)
    if model.state is not None:
        yield from _list_state_parts(model, tp)
    yield Part("norms", _count_norm_parameters(model))
    yield from _list_extra_parts(model)


def _count_norm_parameters(model: ServedModel) -> int:
    g = model.geometry
    if model.family == "nemotron_h":
        return (g.layers + 1) * g.hidden
    if model.latent is not None:
        return g.layers * (2 * g.hidden + model.latent.q_rank + model.latent.kv_rank) + g.hidden
    extra = 0
    if model.global_geometry is not None:  # A scalar for each layer, and longer norms where heads are longer.
        extra = g.layers + model.num_full_layers * 2 * (model.global_geometry[0] - g.head_dim)
        extra += 3 * g.hidden * g.layers if model.experts else 0
    if model.state is not None and g.qk_norm == "head":
        extra -= (g.layers - model.num_attention_layers) * 2 * g.head_dim
    return g.norm_parameters + extra


def _list_attention_parts(model: ServedModel, tp: int) -> Iterator[Part]:
    g, latent = model.geometry, model.latent
    if latent is not None:
        yield from _list_latent_parts(g, latent, tp)
        return
    num_plain = model.num_attention_layers
    if model.global_geometry is not None:
        head_dim, kv_heads, same = model.global_geometry
        num_plain -= model.num_full_layers
        yield from _list_projections(g.hidden, g.heads, kv_heads, head_dim, tp, model.num_full_layers, 1 if same else 2)
    gate = 1 if model.has_output_gate else 0  # As wide as the queries.
    yield from _list_projections(g.hidden, g.heads, g.kv_heads, g.head_dim, tp, num_plain, 2, gate)
    widths = g.attention_width // tp + 2 * max(1, g.kv_heads // tp) * g.head_dim
    biases = (widths if g.has_qkv_bias else 0) + (g.hidden if g.has_o_bias else 0)
    sinks = g.heads // tp if model.family == "gpt_oss" else 0
    yield Part("attention biases", biases + sinks, num_plain)


def _list_projections(
    hidden: int, heads: int, kv_heads: int, head_dim: int, tp: int, layers: int, num_kv: int, gate: int = 0
) -> Iterator[Part]:
    """Yield queries, keys and values as one matrix, and the output; `num_kv` is 1 if the values are the keys."""
    queries = heads // tp * head_dim
    width = queries * (1 + gate) + num_kv * max(1, kv_heads // tp) * head_dim
    yield Part("qkv", hidden * width, layers, block="attention")
    yield Part("attention output", hidden * queries, layers, block="attention")


def _list_latent_parts(g: DecoderGeometry, latent: Latent, tp: int) -> Iterator[Part]:
    head_width = latent.nope + latent.rope
    if latent.q_rank:
        yield Part("compression", g.hidden * (latent.q_rank + latent.cached_width), g.layers, block="attention")
        yield Part("queries", latent.q_rank * g.heads * head_width // tp, g.layers, block="attention")
    else:
        yield Part("compression", g.hidden * latent.cached_width, g.layers, block="attention")
        yield Part("queries", g.hidden * g.heads * head_width // tp, g.layers, block="attention")
    yield Part(
        "keys, values", latent.kv_rank * g.heads * (latent.nope + latent.value) // tp, g.layers, block="attention"
    )
    yield Part("attention output", g.heads * latent.value * g.hidden // tp, g.layers, block="attention")


def _list_mlp_parts(model: ServedModel, tp: int) -> Iterator[Part]:
    g, experts = model.geometry, model.experts
    num_dense = g.layers - (0 if experts is None or experts.keeps_dense else experts.num_layers)
    ups = 2 if g.is_gated else 1
    if model.family == "nemotron_h":
        num_dense = str(model.text.get("hybrid_override_pattern") or "").count("-")
    width = g.intermediate // tp
    num_shared = int(model.text.get("num_kv_shared_layers") or 0)
    if model.text.get("use_double_wide_mlp") and num_shared:  # Gemma 4: layers that share keys and values.
        num_dense -= num_shared
        yield Part("wide MLP up", 2 * ups * g.hidden * width, num_shared, block="mlp")
        yield Part("wide MLP down", 2 * g.hidden * width, num_shared, block="mlp")
    yield Part("MLP up", ups * g.hidden * width, num_dense, block="mlp")
    yield Part("MLP down", g.hidden * width, num_dense, block="mlp")
    if g.has_mlp_bias:
        yield Part("MLP biases", ups * width + g.hidden, num_dense)


def _list_expert_parts(model: ServedModel, experts: Experts, tp: int) -> Iterator[Part]:
    hidden, count, layers = model.geometry.hidden, experts.count, experts.num_layers
    ups, inner = 2 if experts.is_gated else 1, experts.hidden or hidden
    width = experts.width // tp
    yield Part("experts' up", count * ups * inner * width, layers, block="experts")
    yield Part("experts' down", count * inner * width, layers, block="experts")
    if experts.shared_width:
        yield Part("shared expert's up", ups * hidden * experts.shared_width // tp, layers, block="shared expert")
        yield Part("shared expert's down", hidden * experts.shared_width // tp, layers, block="shared expert")
    if experts.hidden:
        yield Part("projections of experts", 2 * hidden * experts.hidden, layers, block="shared expert")
    router = count * hidden + (count if experts.has_bias or model.family in ("deepseek_v3", "glm4_moe") else 0)
    router += hidden if experts.has_shared_gate else 0
    if model.global_geometry is not None:
        router += hidden + count  # Gemma 4: a scale of the input, and one for each expert.
    yield Part("routers", router, layers)
    if experts.has_bias:
        yield Part("experts' biases", count * (ups * width + hidden), layers)


def _list_state_parts(model: ServedModel, tp: int) -> Iterator[Part]:
    state, num_states = model.state, sum(layer.kind == "state" for layer in model.layers)
    assert state is not None
    yield Part("state input", state.input_parameters // tp, num_states, block="state")
    yield Part("state output", state.output_parameters // tp, num_states, block="state")
    yield Part("state's own", state.other_parameters // tp + state.replicated_parameters, num_states)


def _list_extra_parts(model: ServedModel) -> Iterator[Part]:
    """Yield Gemma's embeddings of each layer."""
    per_layer = model.text.get("hidden_size_per_layer_input") or 0
    if not model.family.startswith("gemma4") or not per_layer:
        return
    g, rows = model.geometry, model.text.get("vocab_size_per_layer_input") or model.geometry.vocab
    yield Part("embeddings of each layer", rows * g.layers * per_layer)
    yield Part("projections of each layer", 3 * g.hidden * per_layer + g.hidden, g.layers)
