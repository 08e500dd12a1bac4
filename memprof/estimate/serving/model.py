"""What an inference engine needs to know of a model: its matrices, experts, caches and states, from its configuration.

The shape of attention and MLP is that of geometry.py; this file adds what is particular to larger models: experts,
latent attention (MLA), layers with a state instead of a cache, and layers of several shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memprof.errors import UsageError
from memprof.estimate.geometry import DecoderGeometry, read_geometry
from memprof.estimate.serving.states import StateShape, read_state_shape
from memprof.estimate.serving.vision import ImageEncoder, read_image_encoder

# Families whose attention and MLP are those of another one of geometry.FAMILIES; what differs is read below.
_BASE_FAMILIES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "phi3": "phi3",
    "gemma3_text": "gemma3_text", "olmo2": "olmo2", "gpt2": "gpt2", "gpt_neox": "gpt_neox", "opt": "opt", "phi": "phi",
    "granite": "llama", "gemma": "llama", "mixtral": "mistral", "gpt_oss": "llama", "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen3", "deepseek_v2": "llama", "deepseek_v3": "llama", "kimi_k2": "llama", "glm4_moe": "qwen3",
    "gemma4_text": "gemma3_text", "gemma4_unified_text": "gemma3_text", "qwen3_next": "qwen3", "qwen3_5_text": "qwen3",
    "qwen3_5_moe_text": "qwen3", "minimax_m2": "qwen3", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3", "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2",
    "nemotron_h": "llama", "mimo_vl": "qwen2",
}  # fmt: skip
_TIED_BY_DEFAULT = ("gemma", "gemma4_text", "gemma4_unified_text")
# Entries of a configuration that are objects, where there are any.
_MAPPING_KEYS = ("quantization_config", "rope_scaling", "rope_parameters", "text_config", "vision_config")
FULL, WINDOW, LATENT, STATE = "full", "window", "latent", "state"
ITEMSIZE = 2  # Of a weight or activation: engines load what is float32 in half precision, too.


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture-of-experts layer."""

    count: int
    top_k: int  # Experts that a token uses.
    width: int  # Intermediate size of one expert.
    shared_width: int  # Intermediate size of the shared experts together; 0: none.
    num_layers: int  # Layers with experts.
    is_gated: bool = True  # Whether an expert has a gate beside its up projection.
    has_bias: bool = False
    has_shared_gate: bool = False
    keeps_dense: bool = False  # Whether these layers have their dense MLP, too.
    hidden: int | None = None  # Input width of the experts, where it is not the hidden size.


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (MLA): ranks of the compressed queries, keys and values, and sizes of a head."""

    q_rank: int  # 0: the queries are not compressed.
    kv_rank: int
    nope: int  # Elements of a head without rotary positions.
    rope: int
    value: int

    @property
    def cached_width(self) -> int:
        """Return the elements that a token has in a layer's cache."""
        return self.kv_rank + self.rope


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What a layer keeps for each token (FULL, WINDOW, LATENT), or for each request (STATE)."""

    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0  # Tokens of the sliding window; WINDOW only.


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A decoder model, as an engine loads it."""

    name: str
    hf_id: str  # Repository or path that the engine's command names.
    family: str
    config: Mapping[str, Any]  # Of the whole model.
    text: Mapping[str, Any]  # Of its decoder.
    geometry: DecoderGeometry
    layers: tuple[CachedLayer, ...]  # Those with a cache or state.
    dtype: str
    experts: Experts | None = None
    latent: Latent | None = None
    state: StateShape | None = None
    images: ImageEncoder | None = None
    num_attention_layers: int = 0  # Layers with attention weights.
    num_full_layers: int = 0  # Of these, layers without a window.
    has_output_gate: bool = False  # The query projection also makes a gate for attention's output.
    global_geometry: tuple[int, int, bool] | None = None  # Head size and KV heads of full layers; whether V is K.
    num_parameters: int | None = None  # Exact number, if the catalog has it.

    @property
    def max_positions(self) -> int:
        """Return the model's longest context in tokens, with the factor of its rotary scaling (vllm/config/model.py,
        _get_and_verify_max_len, 0.11 to 0.29; 0.33 expects it in YaRN's max_position_embeddings)."""
        positions, rope = self.geometry.max_positions or 2048, self._rope
        kind, factor = rope.get("rope_type") or rope.get("type"), float(rope.get("factor") or 1)
        if self.family.startswith("gemma3"):  # Its positions are scaled already.
            return positions
        if kind == "yarn":
            return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
        return int(positions * factor) if kind in ("linear", "dynamic") else positions

    @property
    def default_length(self) -> int:
        """Return the context without max_model_len: with LongRoPE the one before scaling (since 0.19)."""
        kind = self._rope.get("rope_type") or self._rope.get("type")
        original = self.text.get("original_max_position_embeddings") if kind == "longrope" else None
        return original or self.max_positions

    @property
    def _rope(self) -> Mapping[str, Any]:
        return self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}

    @property
    def is_hybrid(self) -> bool:
        """Return whether some layers have a state instead of a cache."""
        return any(layer.kind == STATE for layer in self.layers)


def build_served_model(config: Mapping[str, Any], name: str, hf_id: str = "") -> ServedModel:
    """Return the model of a configuration. Raises UsageError: the closed form does not know its architecture, or the
    configuration lacks an entry."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else dict(config)
    for key in _MAPPING_KEYS:
        if not isinstance(text.get(key) or {}, Mapping):
            raise UsageError(
                "the configuration is wrong", value=f"{name}: {key} is {text[key]!r}", hint=f"make {key} an object"
            )
    family = _find_family(config, text)
    if family not in _BASE_FAMILIES:
        hint = f"it knows {', '.join(sorted(_BASE_FAMILIES))}"
        raise UsageError("the closed form does not know this kind of model", value=f"{name}: {family}", hint=hint)
    try:
        model = _build(config, text, family, name, hf_id or name)
        if min(model.max_positions, model.default_length) < 1:
            raise ValueError("its context has no tokens")
        return model
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError("the configuration is incomplete or wrong", value=name, hint=problem) from None


def _find_family(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    name = inner.get("model_type", config["model_type"]) if isinstance(inner, Mapping) else config["model_type"]
    aliases = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
               "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "kimi_vl": "deepseek_v3"}  # fmt: skip
    return aliases.get(str(name), str(name))


def _build(config: Mapping[str, Any], text: Mapping[str, Any], family: str, name: str, hf_id: str) -> ServedModel:
    base = {**text, "model_type": _BASE_FAMILIES[family]}
    if family in _TIED_BY_DEFAULT:
        base.setdefault("tie_word_embeddings", True)
    if family == "qwen2_moe" or "moe_intermediate_size" in base:
        base.setdefault("intermediate_size", base.get("moe_intermediate_size"))
    if family == "gpt_oss":
        base["attention_bias"] = True
    base.setdefault("max_position_embeddings", 2048)
    geometry = read_geometry(base)
    geometry = replace(geometry, family=family, qk_norm=_find_qk_norm(family, base, geometry.qk_norm))
    if family == "glm4_moe":
        geometry = replace(geometry, has_o_bias=False)
    if family == "nemotron_h":  # the square of ReLU needs no gate (vllm/model_executor/models/nemotron_h.py)
        geometry = replace(geometry, is_gated=False)
    latent = _read_latent(base) if base.get("kv_lora_rank") else None
    state = read_state_shape(family, base)
    layers = _list_layers(family, base, geometry, latent)
    global_geometry = None
    if family.startswith("gemma4"):
        same = bool(base.get("attention_k_eq_v"))
        kv_heads = base.get("num_global_key_value_heads") if same else None
        global_geometry = (base.get("global_head_dim") or 512, kv_heads or geometry.kv_heads, same)
    types = _read_layer_types(family, base, geometry.layers)
    return ServedModel(
        name, hf_id, family, config, text, geometry, layers,
        dtype=_find_dtype(config, text), images=read_image_encoder(config, geometry.hidden),
        experts=_read_experts(family, base, geometry.layers, types), latent=latent, state=state,
        num_attention_layers=sum(kind in ("full_attention", "sliding_attention") for kind in types),
        num_full_layers=types.count("full_attention"),
        has_output_gate=family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), global_geometry=global_geometry,
    )  # fmt: skip


def _find_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the dtype in which an engine loads the model: that of the configuration, but for float32 half of it
    (vllm/config/model.py, _resolve_auto_dtype)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return "bfloat16" if name == "float32" else name


def _find_qk_norm(family: str, text: Mapping[str, Any], default: str) -> str:
    """Return the norm of queries and keys. glm4_moe has it by `use_qk_norm`, MiniMax-M2 over all heads together."""
    if family == "glm4_moe":
        return "head" if text.get("use_qk_norm") else ""
    return "hidden" if family == "minimax_m2" else default


def _read_latent(text: Mapping[str, Any]) -> Latent:
    return Latent(
        text.get("q_lora_rank") or 0, text["kv_lora_rank"], text["qk_nope_head_dim"], text["qk_rope_head_dim"],
        text["v_head_dim"],
    )  # fmt: skip


def _read_experts(family: str, text: Mapping[str, Any], layers: int, types: tuple[str, ...]) -> Experts | None:
    count = next((text[k] for k in ("num_local_experts", "n_routed_experts", "num_experts") if text.get(k)), None)
    if not count or (family.startswith("gemma4") and not text.get("enable_moe_block")):
        return None
    top_k = text.get("top_k_experts") or text.get("num_experts_per_tok") or 2
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or text.get("moe_shared_expert_intermediate_size") or 0
    shared = shared or width * (text.get("n_shared_experts") or 0)
    if family == "nemotron_h":
        hidden = text.get("moe_latent_size")
        return Experts(count, top_k, width, shared, types.count("moe"), is_gated=False, hidden=hidden)
    num_dense = text.get("first_k_dense_replace") or len(text.get("mlp_only_layers") or ())
    return Experts(
        count, top_k, width, shared, layers - num_dense,
        has_bias=family == "gpt_oss", keeps_dense=family.startswith("gemma4"),
        has_shared_gate=bool(shared) and family.startswith(("qwen2_moe", "qwen3_next", "qwen3_5")),
    )  # fmt: skip


def _read_layer_types(family: str, text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: full_attention, sliding_attention, linear_attention, moe or mlp."""
    if family == "nemotron_h":
        pattern = text.get("hybrid_override_pattern")
        letters = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
        if pattern:
            return tuple(letters[letter] for letter in pattern)
        names = {"mamba": "linear_attention", "attention": "full_attention"}
        return tuple(names.get(kind, kind) for kind in text.get("layer_types") or text["layers_block_type"])
    types = text.get("layer_types")
    if types and len(types) >= layers:
        return tuple(types[:layers])
    if family.startswith(("qwen3_next", "qwen3_5")):
        interval = text.get("full_attention_interval") or 4
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    if family == "gpt_oss":
        return tuple("sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers))
    if family == "gemma2":
        return tuple("sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers))
    if family.startswith(("gemma3", "gemma4")):
        pattern = text.get("sliding_window_pattern") or 6
        return tuple("full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers))
    if family in ("mistral", "phi3", "mixtral") and text.get("sliding_window"):
        return ("sliding_attention",) * layers
    return ("full_attention",) * layers


def _list_layers(
    family: str, text: Mapping[str, Any], g: DecoderGeometry, latent: Latent | None
) -> tuple[CachedLayer, ...]:
    """Return the layers with a cache or state of their own; layers that use another one's cache are left out."""
    types = _read_layer_types(family, text, g.layers)
    types = types[: len(types) - (text.get("num_kv_shared_layers") or 0)]
    window = text.get("sliding_window") or 0
    full_heads, full_dim = g.kv_heads, g.head_dim
    if family.startswith("gemma4"):
        full_dim = text.get("global_head_dim") or 512
        full_heads = (text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None) or g.kv_heads
    kinds = {
        "sliding_attention": CachedLayer(WINDOW, g.kv_heads, g.head_dim, window),
        "full_attention": CachedLayer(FULL, full_heads, full_dim),
        "linear_attention": CachedLayer(STATE),
    }
    if latent is not None:
        kinds["full_attention"] = CachedLayer(LATENT, 1, latent.cached_width)
    return tuple(kinds[kind] for kind in types if kind in kinds)
