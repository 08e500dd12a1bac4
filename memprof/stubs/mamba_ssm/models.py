"""mamba_ssm.models: a language model of Mamba layers, each after a norm of its sum with a residual.

Sources: mamba_ssm/models/mixer_seq_simple.py, models/config_mamba.py, modules/block.py, modules/mlp.py and
ops/triton/layer_norm.py of state-spaces/mamba@v2.3.2.post1. Attention, Mamba 2 and decoding are not supported.
"""

from __future__ import annotations

import copy
import json
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memprof.stubs.flash_attn import layers
from memprof.stubs.mamba_ssm.scan import Mamba
from memprof.stubs.registry import stub
from memprof.stubs.tools import missing_stub_error, refuse_any, unsupported_error

_MODEL = "mamba_ssm.models.mixer_seq_simple"
_NORMS = "mamba_ssm.ops.triton.layer_norm"
_Output = namedtuple("CausalLMOutput", ["logits"])  # type: ignore[name-match]


def _register(name: str, *aliases: str) -> Callable[[Any], Any]:
    file = name.rpartition(".")[0].replace(".", "/")
    return stub(name, *aliases, source=f"state-spaces/mamba@v2.3.2.post1:{file}.py")


@_register(f"{_NORMS}.layer_norm_fn")
def layer_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, residual_in_fp32=False, is_rms_norm=False, return_dropout_mask=False,
):  # fmt: skip
    """Return the layer or RMS norm of `x` + `residual`; saves row statistics; partial gradients in the backward."""
    refuse_any(
        f"{_NORMS}.layer_norm_fn", x1=x1, weight1=weight1, bias1=bias1, rowscale=rowscale,
        return_dropout_mask=return_dropout_mask or None,
    )  # fmt: skip
    return layers.norm(
        "mamba_ssm.layer_norm_fn", 1, x, weight, bias, residual, dropout_p, prenorm, residual_in_fp32, is_rms_norm
    )


@_register(f"{_NORMS}.rms_norm_fn")
def rms_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, residual_in_fp32=False, return_dropout_mask=False,
):  # fmt: skip
    """Return the RMS norm of `x` + `residual`; allocates as layer_norm_fn does."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32, True,
        return_dropout_mask,
    )  # fmt: skip


@_register(f"{_NORMS}.RMSNorm")
class RMSNorm(layers.RMSNorm):
    """An RMS norm that calls rms_norm_fn."""

    norm = staticmethod(rms_norm_fn)

    def __init__(self, hidden_size, eps=1e-5, dropout_p=0.0, device=None, dtype=None):
        super().__init__(hidden_size, eps, dropout_p, device=device, dtype=dtype)


@_register("mamba_ssm.modules.mlp.GatedMLP")
class GatedMLP(nn.Module):
    """A gated MLP: a linear layer for values and gate, their product, and a second linear layer."""

    def __init__(
        self, in_features, hidden_features=None, out_features=None, activation=F.silu, bias=False, multiple_of=128,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x):
        """Run the MLP: [..., in_features] -> [..., out_features]."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        y = y * self.activation(gate)
        return self.fc2(y)


@_register("mamba_ssm.modules.block.Block")
class Block(nn.Module):
    """A block: norm of the sum with the residual (one kernel if `fused_add_norm`), mixer, and optionally an MLP."""

    def __init__(self, dim, mixer_cls, mlp_cls, norm_cls=nn.LayerNorm, fused_add_norm=False, residual_in_fp32=False):
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm, self.mixer = norm_cls(dim), mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2, self.mlp = norm_cls(dim), mlp_cls(dim)

    def forward(self, hidden_states, residual=None, inference_params=None, **mixer_kwargs):
        hidden_states, residual = _normalize_sum(self, self.norm, hidden_states, residual, prenorm=True)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = _normalize_sum(self, self.norm2, hidden_states, residual, prenorm=True)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


def _normalize_sum(module: Block | MixerModel, norm, x, residual, *, prenorm: bool):
    """Return the norm of `x` + `residual`, by one kernel if `module.fused_add_norm`; if `prenorm`, also the sum."""
    if module.fused_add_norm:
        return layer_norm_fn(
            x, norm.weight, norm.bias, residual=residual, prenorm=prenorm, residual_in_fp32=module.residual_in_fp32,
            eps=norm.eps, is_rms_norm=isinstance(norm, RMSNorm),
        )  # fmt: skip
    residual = x if residual is None else x + residual
    x = norm(residual.to(dtype=norm.weight.dtype))
    if not prenorm:
        return x
    return x, residual.to(torch.float32) if module.residual_in_fp32 else residual


@_register("mamba_ssm.models.config_mamba.MambaConfig")
@dataclass
class MambaConfig:
    """The configuration of MambaLMHeadModel; nothing is allocated."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


@_register(f"{_MODEL}.create_block")
def create_block(
    d_model, d_intermediate, ssm_cfg=None, attn_layer_idx=None, attn_cfg=None, norm_epsilon=1e-5, rms_norm=False,
    residual_in_fp32=False, fused_add_norm=False, layer_idx=None, device=None, dtype=None,
):  # fmt: skip
    """Return a block with a Mamba layer and a norm, and an MLP unless `d_intermediate` is 0."""
    if layer_idx in (attn_layer_idx or ()):
        raise missing_stub_error("mamba_ssm.modules.mha.MHA")
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    ssm_args = copy.deepcopy(ssm_cfg) if ssm_cfg is not None else {}
    layer = ssm_args.pop("layer", "Mamba1")
    if layer not in ("Mamba1", "Mamba2"):
        raise ValueError(f"Invalid ssm_layer: {layer}, only support Mamba1 and Mamba2")
    if layer == "Mamba2":
        raise missing_stub_error("mamba_ssm.modules.mamba2.Mamba2")
    network = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **options)
    block = Block(
        d_model, partial(Mamba, layer_idx=layer_idx, **ssm_args, **options), network if d_intermediate else nn.Identity,
        partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **options), fused_add_norm, residual_in_fp32,
    )  # fmt: skip
    block.layer_idx = layer_idx
    return block


def _initialize(module: nn.Module, n_layer: int, num_residuals: int = 1) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None and not getattr(module.bias, "_no_reinit", False):
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    for name, parameter in module.named_parameters():
        if name in ("out_proj.weight", "fc2.weight"):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            with torch.no_grad():
                parameter.div_(math.sqrt(num_residuals * n_layer))


@_register(f"{_MODEL}.MixerModel")
class MixerModel(nn.Module):
    """The Mamba model without its head: embedding, blocks and final norm."""

    def __init__(
        self, d_model, n_layer, d_intermediate, vocab_size, ssm_cfg=None, attn_layer_idx=None, attn_cfg=None,
        norm_epsilon=1e-5, rms_norm=False, initializer_cfg=None, fused_add_norm=False, residual_in_fp32=False,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(vocab_size, d_model, **options)
        self.layers = nn.ModuleList(
            create_block(
                d_model, d_intermediate, ssm_cfg, attn_layer_idx, attn_cfg, norm_epsilon, rms_norm, residual_in_fp32,
                fused_add_norm, i, **options,
            )
            for i in range(n_layer)
        )  # fmt: skip
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **options)
        self.apply(partial(_initialize, n_layer=n_layer, num_residuals=2 if d_intermediate else 1))

    def forward(self, input_ids, inference_params=None, **mixer_kwargs):
        """Run the model: [batch, time] -> [batch, time, d_model]."""
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, inference_params=inference_params, **mixer_kwargs)
        return _normalize_sum(self, self.norm_f, hidden_states, residual, prenorm=False)


@_register(f"{_MODEL}.MambaLMHeadModel", "mamba_ssm.MambaLMHeadModel")
class MambaLMHeadModel(nn.Module):
    """A MixerModel with a language-model head, whose weight is tied to the embedding if the configuration says so."""

    def __init__(self, config, initializer_cfg=None, device=None, dtype=None):
        super().__init__()
        self.config = config
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        vocab_size = -(-config.vocab_size // config.pad_vocab_size_multiple) * config.pad_vocab_size_multiple
        self.backbone = MixerModel(
            config.d_model, config.n_layer, config.d_intermediate, vocab_size, config.ssm_cfg, config.attn_layer_idx,
            config.attn_cfg, rms_norm=config.rms_norm, initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm, residual_in_fp32=config.residual_in_fp32, **options,
        )  # fmt: skip
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False, **options)
        self.apply(partial(_initialize, n_layer=config.n_layer))
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0, **mixer_kwargs):
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        return _Output(logits=self.lm_head(hidden_states))

    def generate(self, *args, **kwargs):
        raise unsupported_error("mamba_ssm.MambaLMHeadModel.generate", "decoding")

    @classmethod
    def from_pretrained(cls, pretrained_model_name, device=None, dtype=None, **kwargs):
        from transformers.utils import CONFIG_NAME, WEIGHTS_NAME
        from transformers.utils.hub import cached_file

        config = json.loads(Path(str(cached_file(pretrained_model_name, CONFIG_NAME))).read_text(encoding="utf-8"))
        model = cls(MambaConfig(**config), device=device, dtype=dtype, **kwargs)
        weights = torch.load(str(cached_file(pretrained_model_name, WEIGHTS_NAME)), map_location=device)
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
        return model

    def save_pretrained(self, save_directory):
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(vars(self.config), indent=4), encoding="utf-8")
