"""Shapes of decoder models, from their transformers configurations; other architectures have no shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, unknown_name
from memprof.units import format_count, parse_count
from memprof.workload.catalog import (
    ModelEntry,
    find_model,
    has_model,
    list_models,
    read_config_file,
    resolve_size,
    synthesize,
)

_MODEL_HINT = "('memprof models' lists them; a config.json or --params also work)"

# Values of `model_type` whose layers are described in layers.py.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2",
    "gpt2", "gpt_neox", "opt", "phi",
)  # fmt: skip

# PEFT's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING (peft/utils/constants.py), except the default q and v. PEFT
# has no entry for Phi-3 and OLMo 2, which get the corresponding modules.
_LORA_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "phi": "q_proj,v_proj,fc1,fc2", "phi3": "qkv_proj"}

# Matrix -> name of its module in transformers, where the name is not MATRIX_proj.
_MODULE_NAMES = {
    "gpt2": {"qkv": "c_attn", "o": "c_proj", "up": "c_fc", "down": "c_proj"},
    "gpt_neox": {"qkv": "query_key_value", "o": "dense", "up": "dense_h_to_4h", "down": "dense_4h_to_h"},
    "phi": {"o": "dense", "up": "fc1", "down": "fc2"},
    "phi3": {"up": "gate_up_proj"},
    "opt": {"o": "out_proj", "up": "fc1", "down": "fc2"},
}


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """The shape of a decoder model: its sizes, and which norms, biases and fused matrices its layers have."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    is_gated: bool = True
    norm: str = "rms"  # rms, gemma (scaled in float32), olmo (cast after the weight) or layer.
    num_norms: int = 2  # Norms of hidden size in a layer.
    qk_norm: str = ""  # Norm of queries and keys: "head" (each head), "hidden" (all heads together), "" (none).
    activation: str = "silu"
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False  # The gate and the up projection are one matrix.
    rotary_fraction: float = 1.0  # Fraction of a head with rotary positions.
    num_positions: int = 0  # Rows of a learned position embedding.
    has_dropout: bool = False  # After attention and MLP, in training.
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False
    has_softcap: bool = False  # The logits go through tanh.
    window: int = 0  # Tokens of the sliding attention window; 0: no window.
    global_interval: int = 0  # Every so many layers one has no window; 0: all layers are the same.
    max_positions: int | None = None

    @property
    def attention_width(self) -> int:
        """Return the number of elements of a token's queries in all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the number of elements of a token's keys in all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def default_lora_modules(self) -> str:
        """Return the names of the modules that PEFT adapts by default, separated by commas."""
        return _LORA_TARGETS.get(self.family, "q_proj,v_proj")

    def resolve_lora_targets(self, modules: str | None) -> tuple[str, ...]:
        """Return the names of the matrices that LoRA adapts; `modules` is PEFT's target_modules (None: its default).
        Raises UsageError: a layer has no such module."""
        module_names = _MODULE_NAMES.get(self.family, {})
        names = {matrix: module_names.get(matrix, f"{matrix}_proj") for matrix in self.list_matrices()}
        if modules == "all-linear":
            return tuple(names)
        targets = [target.strip().rpartition(".")[2] for target in (modules or self.default_lora_modules).split(",")]
        for name in targets:
            if name not in names.values():
                raise unknown_name("--lora-targets", name, [*dict.fromkeys(names.values()), "all-linear"])
        return tuple(matrix for matrix, name in names.items() if name in targets)

    def list_matrices(self) -> dict[str, tuple[int, int, bool]]:
        """Return the linear layers of a decoder layer: name -> (input features, output features, has a bias)."""
        h, q, kv, i = self.hidden, self.attention_width, self.kv_width, self.intermediate
        widths = {"qkv": q + 2 * kv} if self.has_fused_qkv else {"q": q, "k": kv, "v": kv}
        shapes = {name: (h, width, self.has_qkv_bias) for name, width in widths.items()}
        shapes["o"] = (q, h, self.has_o_bias)
        if self.is_gated and not self.has_fused_gate_up:
            shapes["gate"] = (h, i, self.has_mlp_bias)
        shapes["up"] = (h, i * (1 + self.has_fused_gate_up), self.has_mlp_bias)
        return shapes | {"down": (i, h, self.has_mlp_bias)}

    @property
    def linear_parameters(self) -> int:
        """Return the number of weights and biases in all layers' linear layers."""
        matrices = self.list_matrices().values()
        return self.layers * sum(rows * columns + columns * bias for rows, columns, bias in matrices)

    @property
    def norm_parameters(self) -> int:
        """Return the number of parameters in all norms."""
        norm_size = self.hidden * (2 if self.norm == "layer" else 1)
        qk_norm = {"": 0, "head": 2 * self.head_dim, "hidden": self.attention_width + self.kv_width}[self.qk_norm]
        return self.layers * (self.num_norms * norm_size + qk_norm) + norm_size

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied parameters count once."""
        head = (0 if self.tied else self.vocab * self.hidden) + (self.vocab if self.has_head_bias else 0)
        embeddings = (self.vocab + self.num_positions) * self.hidden
        return embeddings + head + self.linear_parameters + self.norm_parameters


@dataclass(frozen=True, slots=True)
class EstimatedModel:
    """The model of an estimate: its number of parameters, its shape, and what the user named (`origin`)."""

    name: str
    num_parameters: int
    geometry: DecoderGeometry | None  # None: the closed form does not know the architecture.
    config: Mapping[str, Any]
    origin: str  # What the user named: params, model or config.
    checkpoint_dtype: str
    geometry_error: str = ""
    path: str = ""  # Path of the configuration; empty for models of the catalog.
    rule: str = ""  # How the geometry was derived from the number of parameters; empty if it was not.

    @property
    def is_derived(self) -> bool:
        """Return whether the shape was derived from the number of parameters."""
        return self.origin == "params"


def build_from_params(text: str) -> EstimatedModel:
    """Return a model with the shape of a Llama and the number of parameters in `text`, such as "1.2B".
    Raises UsageError: `text` is not a number, or no shape is known for the number."""
    count = parse_count(text)
    config = synthesize(count).load_config()
    geometry = read_geometry(config)
    rule = (
        "Only a number of parameters was given. The shape is that of a Llama of this size (hidden size over layers, "
        "vocabulary and head size as published models near it have them, memprof/workload/catalog/sizes.py): "
        f"{geometry.layers} layers, hidden size {geometry.hidden:,}, {geometry.heads} heads of {geometry.head_dim} "
        f"({geometry.kv_heads} for keys and values), intermediate size {geometry.intermediate:,}, vocabulary "
        f"{geometry.vocab:,}: {geometry.num_parameters:,} parameters. Weights, gradients and optimizer state are of "
        f"the {count:,} given; what is marked ~ is of that shape."
    )
    name = f"{format_count(count, '.4g')} parameters"
    return EstimatedModel(name, count, geometry, config, "params", "bfloat16", rule=rule)


def build_from_model(name: str) -> EstimatedModel:
    """Return the model with this name in the catalog, or of the configuration file or folder at this path.
    Raises UsageError: no such model or file, or the file is no configuration."""
    if has_model(name):
        return _build_from_entry(find_model(name))
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".json"):
        return build_from_config(path)
    raise unknown_name("model", name, [entry.key for entry in list_models()], see=_MODEL_HINT)


def build_from_size(size: str) -> EstimatedModel:
    """Return the catalog's model of `size`, such as "4B", or a Llama of this size. Raises UsageError: not a size."""
    return _build_from_entry(resolve_size(size))


def build_from_config(path: Path) -> EstimatedModel:
    """Return the model of the config.json at `path`. Raises UsageError: the file cannot be read, or is incomplete."""
    file, config = read_config_file(path)
    if config["model_type"] not in FAMILIES:
        value = f'{file}: "model_type": "{config["model_type"]}"'
        hint = f"it knows {', '.join(FAMILIES)}; memprof profile --model {path} runs any model of transformers"
        raise UsageError("the closed form does not know this kind of model", value=value, hint=hint)
    try:
        geometry = read_geometry(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError("the configuration is incomplete or wrong", value=file, hint=problem) from None
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = file.resolve().parent.name
    return EstimatedModel(name, geometry.num_parameters, geometry, config, "config", str(dtype), path=str(file))


def _build_from_entry(entry: ModelEntry) -> EstimatedModel:
    config = entry.load_config()
    is_supported = config["model_type"] in FAMILIES and entry.task == "causal-lm"
    error = "" if is_supported else f"the closed form has no layer of {entry.architecture}"
    geometry = read_geometry(config) if is_supported else None
    return EstimatedModel(entry.key, entry.num_parameters, geometry, config, "model", entry.checkpoint_dtype, error)


def _first_positive(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first non-null value of `names`, or `default`. Raises KeyError or ValueError: no positive integer."""
    entries = ((name, config[name]) for name in names if config.get(name) is not None)
    name, value = next(entries, (names[0], default))
    if value is None:
        raise KeyError(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    return value


def read_geometry(config: Mapping[str, Any]) -> DecoderGeometry:
    """Return the shape in a configuration of one of FAMILIES, with the defaults of transformers' classes."""
    family = config["model_type"]
    hidden = _first_positive(config, "hidden_size", "n_embd")
    heads = _first_positive(config, "num_attention_heads", "n_head")
    window = config.get("sliding_window")
    has_window = isinstance(window, int) and window > 0 and config.get("use_sliding_window") is not False
    common: dict[str, Any] = {
        "family": family,
        "hidden": hidden,
        "layers": _first_positive(config, "num_hidden_layers", "n_layer"),
        "heads": heads,
        "kv_heads": _first_positive(config, "num_key_value_heads", default=heads),
        "head_dim": _first_positive(config, "head_dim", default=hidden // heads),
        "vocab": _first_positive(config, "vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", family in ("gpt2", "opt", "gemma2", "gemma3_text"))),
        "window": window if has_window else 0,
        "max_positions": _first_positive(config, "max_position_embeddings", "n_positions"),
    }
    if family in ("gpt2", "gpt_neox", "opt", "phi"):
        return DecoderGeometry(**{**common, **_read_gpt2_shape(config, family, hidden)})
    bias = bool(config.get("attention_bias", False))
    return DecoderGeometry(
        **common,
        intermediate=_first_positive(config, "intermediate_size"),
        norm={"gemma2": "gemma", "gemma3_text": "gemma", "olmo2": "olmo"}.get(family, "rms"),
        num_norms=4 if family.startswith("gemma") else 2,
        qk_norm={"qwen3": "head", "gemma3_text": "head", "olmo2": "hidden"}.get(family, ""),
        activation="gelu" if family.startswith("gemma") else "silu",
        has_fused_qkv=family == "phi3",
        has_fused_gate_up=family == "phi3",
        rotary_fraction=float(config.get("partial_rotary_factor", 1.0)) if family == "phi3" else 1.0,
        # transformers/models/gemma3/configuration_gemma3.py: five layers with a window, one without.
        global_interval=_first_positive(config, "sliding_window_pattern", default=6) if family == "gemma3_text" else 0,
        has_qkv_bias=True if family == "qwen2" else bias,
        has_o_bias=False if family == "qwen2" else bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_softcap=config.get("final_logit_softcapping") is not None,
    )


def _read_gpt2_shape(config: Mapping[str, Any], family: str, hidden: int) -> dict[str, Any]:
    """Return the fields of DecoderGeometry for GPT-2 and similar models: layer norms, an MLP without gate, biases."""
    activation = config.get("activation_function") or config.get("hidden_act") or "gelu"
    shape: dict[str, Any] = {
        "is_gated": False, "norm": "layer", "activation": "gelu-python" if activation == "gelu_new" else activation,
        "has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True, "rotary_fraction": 0.0,
    }  # fmt: skip
    if family == "gpt2":
        shape["has_fused_qkv"] = True
        shape["num_positions"] = _first_positive(config, "n_positions", "max_position_embeddings")
        dropout, mlp_width = config.get("resid_pdrop", 0.1), _first_positive(config, "n_inner", default=4 * hidden)
    elif family == "opt":
        # OPT's learned positions begin at 2 (modeling_opt.py, OPTLearnedPositionalEmbedding).
        shape["num_positions"] = _first_positive(config, "max_position_embeddings") + 2
        dropout, mlp_width = config.get("dropout", 0.1), _first_positive(config, "ffn_dim")
    elif family == "gpt_neox":
        fraction = config.get("rotary_pct", (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25))
        bias = bool(config.get("attention_bias", True))
        dropout, mlp_width = config.get("hidden_dropout", 0.0), _first_positive(config, "intermediate_size")
        shape |= {"has_fused_qkv": True, "rotary_fraction": float(fraction), "has_qkv_bias": bias, "has_o_bias": bias}
    else:
        fraction = config.get("partial_rotary_factor", 0.5)
        dropout, mlp_width = config.get("resid_pdrop", 0.0), _first_positive(config, "intermediate_size")
        shape |= {"rotary_fraction": float(fraction), "num_norms": 1, "has_head_bias": True}
    return {**shape, "intermediate": mlp_width, "has_dropout": bool(dropout)}
