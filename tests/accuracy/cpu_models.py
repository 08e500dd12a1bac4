"""Small models of many families, with the batch of one training step each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Builder = Callable[[], nn.Module]


def tokens(length: int = 64) -> Batch:
    ids = torch.arange(2 * length).reshape(2, length) % 1000
    return {"input_ids": ids, "labels": ids.clone()}


def images(size: int = 32) -> Batch:
    return {"pixel_values": torch.zeros(4, 3, size, size), "labels": torch.zeros(4, dtype=torch.int64)}


def transformer(architecture: str, configuration: str, **settings: Any) -> Builder:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, configuration)(**settings)
        model: nn.Module = getattr(transformers, architecture)._from_config(config, attn_implementation="eager")
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # type: ignore[union-attr]
        return model

    return build


GPT2 = transformer(
    "GPT2LMHeadModel", "GPT2Config", vocab_size=1000, n_embd=64, n_layer=2, n_head=4, n_positions=128,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_DECODER: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
_NO_DROPOUT = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
LLAMA = transformer("LlamaForCausalLM", "LlamaConfig", **_DECODER)
QWEN3 = transformer("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=16, tie_word_embeddings=True)
GEMMA2 = transformer("Gemma2ForCausalLM", "Gemma2Config", **_DECODER, head_dim=16, pad_token_id=0)
MIXTRAL = transformer(
    "MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=2, num_experts_per_tok=2,
    experts_implementation="eager",
)  # fmt: skip
MAMBA = transformer(
    "MambaForCausalLM", "MambaConfig", vocab_size=1000, hidden_size=64, state_size=8, num_hidden_layers=2,
)  # fmt: skip
MAMBA2 = transformer(
    "Mamba2ForCausalLM", "Mamba2Config", vocab_size=1000, hidden_size=64, state_size=8, num_hidden_layers=2,
    num_heads=8, head_dim=16, n_groups=1, chunk_size=8,
)  # fmt: skip
RWKV = transformer(
    "RwkvForCausalLM", "RwkvConfig", vocab_size=1000, hidden_size=64, attention_hidden_size=64, intermediate_size=128,
    num_hidden_layers=2, context_length=64,
)  # fmt: skip
RECURRENT_GEMMA = transformer(
    "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", vocab_size=1000, hidden_size=64, intermediate_size=256,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, lru_width=64,
    attention_window_size=8,
)  # fmt: skip
BERT = transformer("BertForMaskedLM", "BertConfig", **_ENCODER)
DEBERTA = transformer(
    "DebertaV2ForMaskedLM", "DebertaV2Config", **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
)  # fmt: skip
VIT = transformer(
    "ViTForImageClassification", "ViTConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, image_size=32, patch_size=8, num_labels=10, hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
)  # fmt: skip
SWIN = transformer(
    "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
    num_heads=[2, 4], window_size=4, num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    drop_path_rate=0,
)  # fmt: skip
CONVNEXT = transformer(
    "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2,
    patch_size=2, num_labels=10, drop_path_rate=0,
)  # fmt: skip
RESNET = transformer(
    "ResNetForImageClassification", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
    layer_type="basic", num_labels=10,
)  # fmt: skip
T5 = transformer(
    "T5ForConditionalGeneration", "T5Config", vocab_size=1000, d_model=64, d_kv=16, d_ff=128, num_layers=2,
    num_heads=4, dropout_rate=0, decoder_start_token_id=0,
)  # fmt: skip
BART = transformer(
    "BartForConditionalGeneration", "BartConfig", vocab_size=1000, d_model=64, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    max_position_embeddings=128, **_NO_DROPOUT,
)  # fmt: skip
WHISPER = transformer(
    "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=1000, d_model=64, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    num_mel_bins=16, max_source_positions=32, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, **_NO_DROPOUT,
)  # fmt: skip


def lora() -> nn.Module:
    """A frozen GPT-2 with PEFT's matrices beside its transposed layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: nn.Module = peft.get_peft_model(GPT2(), config)
        return adapted


def speech() -> Batch:
    return {"input_features": torch.zeros(2, 16, 64), "labels": tokens(32)["labels"]}


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())}


class Perceptron(nn.Module):
    """Fan-out and fan-in in front of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.SiLU())
        self.head = nn.Linear(256, 64)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.head(self.layers(features))
        return {"loss": ((states + features) - features * states.tanh()).pow(2).mean()}


class LSTM(nn.Module):
    """A language model on a long short-term memory, written with linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.inputs, self.recurrent = nn.Linear(64, 256), nn.Linear(64, 256, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        gates_of_inputs = self.inputs(self.embedding(input_ids))
        state = cell = gates_of_inputs.new_zeros(input_ids.shape[0], 64)
        states = []
        for step in range(input_ids.shape[1]):
            gates = gates_of_inputs[:, step] + self.recurrent(state)
            write, keep, new, read = gates.chunk(4, -1)
            cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
            state = read.sigmoid() * cell.tanh()
            states.append(state)
        return _loss(self.head(torch.stack(states, 1)), labels)


class GRU(nn.Module):
    """The same on a gated recurrent unit, two layers deep."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.inputs = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))
        self.recurrent = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.embedding(input_ids)
        for inputs, recurrent in zip(self.inputs, self.recurrent, strict=True):
            state = torch.zeros(input_ids.shape[0], 64, device=states.device)
            outputs = []
            for given in inputs(states).unbind(1):
                reset, update, new = given.chunk(3, -1)
                own_reset, own_update, own_new = recurrent(state).chunk(3, -1)
                update = torch.sigmoid(update + own_update)
                new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
                state = (1 - update) * new + update * state
                outputs.append(state)
            states = torch.stack(outputs, 1)
        return _loss(self.head(states), labels)


class RNN(nn.Module):
    """A cell of torch's own unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(1000, 64), nn.RNNCell(64, 64), nn.Linear(64, 1000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs, state, states = self.embedding(input_ids), None, []
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
            states.append(state)
        return _loss(self.head(torch.stack(states, 1)), labels)


class _Block(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.silu(self.norm(states)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down, self.bottom, self.up = _Block(16, 32), _Block(32, 32), _Block(48, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.first(pixel_values)
        states = nn.functional.avg_pool2d(self.down(wide), 2)
        states = nn.functional.interpolate(self.bottom(states) + states, scale_factor=2)
        states = self.up(torch.cat([wide, states], 1))
        return {"loss": (self.head(states) - pixel_values).pow(2).mean()}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.shortcut = nn.Conv2d(16, 32, 1, stride=2)
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        states = torch.relu(self.first_norm(self.first(pixel_values)))
        states = torch.relu(self.second_norm(self.second(states))) + self.shortcut(states)
        states = nn.functional.max_pool2d(states, 2).mean((2, 3))
        return {"loss": nn.functional.cross_entropy(self.head(states), labels)}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for width in (16, 64) * 2
        )
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for number, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            if number % 2:
                states = states + mixer(norm(states))
            else:
                states = states + mixer(norm(states).transpose(1, 2)).transpose(1, 2)
        return {"loss": nn.functional.cross_entropy(self.head(states.mean(1)), labels)}


class Model(NamedTuple):
    family: str
    build: Builder
    batch: Callable[[], Batch]


def _features() -> Batch:
    return {"features": torch.zeros(32, 64)}


def _short() -> Batch:
    return tokens(16)


MODELS = {
    "gpt2": Model("decoder", GPT2, tokens),
    "llama": Model("decoder, grouped queries", LLAMA, tokens),
    "qwen3": Model("decoder, tied weights", QWEN3, tokens),
    "gemma2": Model("decoder, sliding window", GEMMA2, tokens),
    "lora": Model("decoder, adapters", lora, tokens),
    "mixtral": Model("mixture of experts", MIXTRAL, tokens),
    "mamba": Model("state space", MAMBA, _short),
    "mamba2": Model("state space", MAMBA2, _short),
    "rwkv": Model("linear attention", RWKV, _short),
    "recurrent-gemma": Model("gated linear recurrence", RECURRENT_GEMMA, _short),
    "bert": Model("encoder", BERT, tokens),
    "deberta": Model("encoder, relative positions", DEBERTA, tokens),
    "t5": Model("encoder-decoder", T5, tokens),
    "bart": Model("encoder-decoder", BART, tokens),
    "whisper": Model("speech encoder-decoder", WHISPER, speech),
    "vit": Model("vision transformer", VIT, images),
    "swin": Model("vision transformer, windows", SWIN, images),
    "convnext": Model("convolutional", CONVNEXT, images),
    "resnet": Model("convolutional, batch norm", RESNET, images),
    "convolutions": Model("convolutional, batch norm", ConvNet, images),
    "u-net": Model("convolutional, group norm", UNet, images),
    "mixer": Model("mixer", Mixer, images),
    "perceptron": Model("perceptron", Perceptron, _features),
    "lstm": Model("recurrent", LSTM, _short),
    "gru": Model("recurrent", GRU, _short),
    "rnn": Model("recurrent, torch's cell", RNN, _short),
}
