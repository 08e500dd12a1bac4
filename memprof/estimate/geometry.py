"""A decoder's shape, read from its configuration; unknown architectures have no shape."""

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

_SEE = "('memprof models' lists them; a config.json or --params also work)"

# Values of `model_type` whose layers layers.py has op by op.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2",
    "gpt2", "gpt_neox", "opt", "phi",
)  # fmt: skip

# As in PEFT's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING (peft/utils/constants.py); else q and v. Phi-3 and
# OLMo 2 are not in it: what is the same there is taken.
_LORA_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "phi": "q_proj,v_proj,fc1,fc2", "phi3": "qkv_proj"}

# Names of the matrices in transformers, where they are not of the manner of q_proj.
_MODULES = {
    "gpt2": {"qkv": "c_attn", "o": "c_proj", "up": "c_fc", "down": "c_proj"},
    "gpt_neox": {"qkv": "query_key_value", "o": "dense", "up": "dense_h_to_4h", "down": "dense_4h_to_h"},
    "phi": {"o": "dense", "up": "fc1", "down": "fc2"},
    "phi3": {"up": "gate_up_proj"},
    "opt": {"o": "out_proj", "up": "fc1", "down": "fc2"},
}


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """The shape of a decoder with one kind of layer."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    gated: bool = True
    norm: str = "rms"  # rms, gemma (scaled in float32), olmo (cast after its weight) or layer.
    norms: int = 2  # Norms of hidden size in a layer.
    qk_norm: str = ""  # head: of each head, hidden: of all together.
    activation: str = "silu"
    fused_qkv: bool = False
    fused_up: bool = False  # The gate and the up projection are one matrix.
    rotary: float = 1.0  # Share of a head that is rotated.
    positions: int = 0  # Rows of a learned position embedding.
    dropout: bool = False  # After attention and MLP, in training.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    softcap: bool = False  # The logits go through tanh.
    window: int = 0  # Tokens that a sliding window sees; 0: none.
    global_every: int = 0  # Of so many layers the last has no window; 0: all that the model has are alike.
    max_positions: int | None = None

    @property
    def attention_width(self) -> int:
        """Return the elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the elements of all key heads of a token."""
        return self.kv_heads * self.head_dim

    @property
    def lora_modules(self) -> str:
        """Return the names of the modules that PEFT adapts by default, separated by commas."""
        return _LORA_TARGETS.get(self.family, "q_proj,v_proj")

    def lora_targets(self, asked: str | None) -> tuple[str, ...]:
        """Return the adapted matrices: the matrices of the modules in `asked`, as in PEFT's target_modules.
        Raises UsageError: a layer has no such module."""
        names = {which: _MODULES.get(self.family, {}).get(which, f"{which}_proj") for which in self.matrices()}
        if asked == "all-linear":
            return tuple(names)
        wanted = [part.strip().rpartition(".")[2] for part in (asked or self.lora_modules).split(",")]
        for name in wanted:
            if name not in names.values():
                raise unknown_name("--lora-targets", name, [*dict.fromkeys(names.values()), "all-linear"])
        return tuple(which for which, name in names.items() if name in wanted)

    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """Return inputs, outputs and the presence of a bias of a layer's linear layers, by name."""
        h, q, kv, i = self.hidden, self.attention_width, self.kv_width, self.intermediate
        widths = {"qkv": q + 2 * kv} if self.fused_qkv else {"q": q, "k": kv, "v": kv}
        found = {name: (h, width, self.qkv_bias) for name, width in widths.items()} | {"o": (q, h, self.o_bias)}
        if self.gated and not self.fused_up:
            found["gate"] = (h, i, self.mlp_bias)
        return found | {"up": (h, i * (1 + self.fused_up), self.mlp_bias), "down": (i, h, self.mlp_bias)}

    @property
    def linear_parameters(self) -> int:
        """Return the number of weights and biases in all layers' linear layers."""
        return self.layers * sum(rows * columns + columns * bias for rows, columns, bias in self.matrices().values())

    @property
    def norm_parameters(self) -> int:
        """Return the number of parameters in all norms."""
        each = self.hidden * (2 if self.norm == "layer" else 1)
        of_heads = {"": 0, "head": 2 * self.head_dim, "hidden": self.attention_width + self.kv_width}[self.qk_norm]
        return self.layers * (self.norms * each + of_heads) + each

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied parameters count once."""
        head = (0 if self.tied else self.vocab * self.hidden) + (self.vocab if self.head_bias else 0)
        embeddings = (self.vocab + self.positions) * self.hidden
        return embeddings + head + self.linear_parameters + self.norm_parameters


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that an estimate is made for."""

    name: str
    num_parameters: int
    geometry: DecoderGeometry | None  # None: its layers are not among those that the closed form knows.
    config: Mapping[str, Any]
    given: str  # params, model or config: what the user gave.
    checkpoint_dtype: str
    why_no_geometry: str = ""
    path: str = ""  # Of the configuration, if it is no model of the catalog.
    rule: str = ""  # How the geometry was derived, if only a number of parameters was given.

    @property
    def derived(self) -> bool:
        """Return whether the shape was derived from the number of parameters."""
        return self.given == "params"


def from_params(text: str) -> Subject:
    """Return a decoder with the given number of parameters, in the shape of a Llama (workload/catalog/sizes.py).
    Raises UsageError: `text` is no number of parameters, or no shape is known for this number."""
    count = parse_count(text)
    entry = synthesize(count)
    geometry = _read_geometry(dict(entry.config or {}))
    rule = (
        "Only a number of parameters was given. The shape is that of a Llama of this size (hidden size over layers, "
        "vocabulary and head size as published models near it have them, memprof/workload/catalog/sizes.py): "
        f"{geometry.layers} layers, hidden size {geometry.hidden:,}, {geometry.heads} heads of {geometry.head_dim} "
        f"({geometry.kv_heads} for keys and values), intermediate size {geometry.intermediate:,}, vocabulary "
        f"{geometry.vocab:,}: {geometry.num_parameters:,} parameters. Weights, gradients and optimizer state are of "
        f"the {count:,} given; what is marked ~ is of that shape."
    )
    name = f"{format_count(count, '.4g')} parameters"
    return Subject(name, count, geometry, dict(entry.config or {}), "params", "bfloat16", rule=rule)


def from_model(name: str) -> Subject:
    """Return a model of the catalog, or of a configuration in a file or folder.
    Raises UsageError: the model or file does not exist, or the file is no configuration."""
    if has_model(name):
        return _subject_of_entry(find_model(name))
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".json"):
        return from_config(path)
    raise unknown_name("model", name, [entry.key for entry in list_models()], see=_SEE)


def from_size(size: str) -> Subject:
    """Return the default model of a size such as 4B, else a Llama of it. Raises UsageError: `size` is no size."""
    return _subject_of_entry(resolve_size(size))


def from_config(path: Path) -> Subject:
    """Return the model of a transformers config.json. Raises UsageError: the file cannot be read, or is incomplete."""
    file, config = read_config_file(path)
    if config["model_type"] not in FAMILIES:
        value = f'{file}: "model_type": "{config["model_type"]}"'
        hint = f"it knows {', '.join(FAMILIES)}; memprof profile --model {path} runs any model of transformers"
        raise UsageError("the closed form does not know this kind of model", value=value, hint=hint)
    try:
        geometry = _read_geometry(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError("the configuration is incomplete or wrong", value=file, hint=problem) from None
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = file.resolve().parent.name
    return Subject(name, geometry.num_parameters, geometry, config, "config", str(dtype), path=str(file))


def _subject_of_entry(entry: ModelEntry) -> Subject:
    config = entry.load_config()
    known = config["model_type"] in FAMILIES and entry.task == "causal-lm"
    why = "" if known else f"the closed form has no layer of {entry.architecture}"
    geometry = _read_geometry(config) if known else None
    return Subject(entry.key, entry.num_parameters, geometry, config, "model", entry.checkpoint_dtype, why)


def _first_positive(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these entries that is not null, else the default."""
    set_here = ((name, config[name]) for name in names if config.get(name) is not None)
    name, value = next(set_here, (names[0], default))
    if value is None:
        raise KeyError(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    return value


def _read_geometry(config: Mapping[str, Any]) -> DecoderGeometry:
    """Return the shape of a configuration of one of FAMILIES, with the defaults of transformers' classes."""
    kind = config["model_type"]
    hidden = _first_positive(config, "hidden_size", "n_embd")
    heads = _first_positive(config, "num_attention_heads", "n_head")
    window = config.get("sliding_window")
    is_windowed = isinstance(window, int) and window > 0 and config.get("use_sliding_window") is not False
    common: dict[str, Any] = {
        "family": kind,
        "hidden": hidden,
        "layers": _first_positive(config, "num_hidden_layers", "n_layer"),
        "heads": heads,
        "kv_heads": _first_positive(config, "num_key_value_heads", default=heads),
        "head_dim": _first_positive(config, "head_dim", default=hidden // heads),
        "vocab": _first_positive(config, "vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", kind in ("gpt2", "opt", "gemma2", "gemma3_text"))),
        "window": window if is_windowed else 0,
        "max_positions": _first_positive(config, "max_position_embeddings", "n_positions"),
    }
    if kind in ("gpt2", "gpt_neox", "opt", "phi"):
        return DecoderGeometry(**{**common, **_read_gpt2_shape(config, kind, hidden)})
    bias = bool(config.get("attention_bias", False))
    return DecoderGeometry(
        **common,
        intermediate=_first_positive(config, "intermediate_size"),
        norm={"gemma2": "gemma", "gemma3_text": "gemma", "olmo2": "olmo"}.get(kind, "rms"),
        norms=4 if kind.startswith("gemma") else 2,
        qk_norm={"qwen3": "head", "gemma3_text": "head", "olmo2": "hidden"}.get(kind, ""),
        activation="gelu" if kind.startswith("gemma") else "silu",
        fused_qkv=kind == "phi3",
        fused_up=kind == "phi3",
        rotary=float(config.get("partial_rotary_factor", 1.0)) if kind == "phi3" else 1.0,
        # transformers/models/gemma3/configuration_gemma3.py: five layers with a window, one without.
        global_every=_first_positive(config, "sliding_window_pattern", default=6) if kind == "gemma3_text" else 0,
        qkv_bias=True if kind == "qwen2" else bias,
        o_bias=False if kind == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        softcap=config.get("final_logit_softcapping") is not None,
    )


def _read_gpt2_shape(config: Mapping[str, Any], kind: str, hidden: int) -> dict[str, Any]:
    """Return the fields of a geometry of the GPT-2 family: layer norms, a plain MLP."""
    activation = config.get("activation_function") or config.get("hidden_act") or "gelu"
    shape: dict[str, Any] = {
        "gated": False, "norm": "layer", "activation": "gelu-python" if activation == "gelu_new" else activation,
        "qkv_bias": True, "o_bias": True, "mlp_bias": True, "rotary": 0.0,
    }  # fmt: skip
    if kind == "gpt2":
        shape |= {"fused_qkv": True, "positions": _first_positive(config, "n_positions", "max_position_embeddings")}
        dropout, inner = config.get("resid_pdrop", 0.1), _first_positive(config, "n_inner", default=4 * hidden)
    elif kind == "opt":
        # OPT's learned positions begin at 2 (modeling_opt.py, OPTLearnedPositionalEmbedding).
        shape["positions"] = _first_positive(config, "max_position_embeddings") + 2
        dropout, inner = config.get("dropout", 0.1), _first_positive(config, "ffn_dim")
    elif kind == "gpt_neox":
        share = config.get("rotary_pct", (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25))
        bias = bool(config.get("attention_bias", True))
        dropout, inner = config.get("hidden_dropout", 0.0), _first_positive(config, "intermediate_size")
        shape |= {"fused_qkv": True, "rotary": float(share), "qkv_bias": bias, "o_bias": bias}
    else:
        share = config.get("partial_rotary_factor", 0.5)
        dropout, inner = config.get("resid_pdrop", 0.0), _first_positive(config, "intermediate_size")
        shape |= {"rotary": float(share), "norms": 1, "head_bias": True}
    return {**shape, "intermediate": inner, "dropout": bool(dropout)}
