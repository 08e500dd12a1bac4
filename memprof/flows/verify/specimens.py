"""The models on which fixes are verified: real architectures, small enough to run in float64 on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.flows.verify.models import check_task, make_spec
from memprof.spec import TargetSpec
from memprof.workload.models import find_source

VOCAB_SIZE = 131
NUM_TOKENS = 24
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Specimen:
    """A model that fixes are verified on."""

    name: str
    build: Callable[[], nn.Module]  # in float32, its weights drawn from torch's generator
    build_large: Callable[[], nn.Module]  # for the peak
    vocab_size: int
    cases: tuple[str, ...]  # kinds of batches; see `batches`
    tokens: int = NUM_TOKENS
    peak_tokens: int = 512  # tokens of the sequence in the step whose peak is simulated and measured
    kind: str = ""  # kind of model of specialised fixes (`Fix.for_models`); empty: for general fixes


class Handwritten(nn.Module):
    """A decoder like those in user code: learned positions, a head with a bias, and forward returns loss and logits."""

    def __init__(
        self, vocab_size: int = VOCAB_SIZE, hidden_size: int = 32, layers: int = 3, positions: int = 64
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(positions, hidden_size)
        self.layers = nn.ModuleList(_Block(hidden_size) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return logits, or loss and logits."""
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return (logits,)
        shifted = logits[:, :-1].reshape(-1, logits.size(-1))
        return functional.cross_entropy(shifted, labels[:, 1:].reshape(-1)), logits


class _Block(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.heads = 4
        self.norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mlp: torch.Tensor = self.mlp(x)
        return x + mlp


_CASES = ("plain", "ignored labels", "padding", "accumulation", "all ignored")
_HANDWRITTEN_CASES = ("plain", "ignored labels", "all ignored")


def _make_gpt2(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        **{
            "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB_SIZE, "n_positions": 64, "bos_token_id": 1,
            "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "loss_type": "ForCausalLM",
            "use_cache": False,
            **changes,
        }
    )  # fmt: skip
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


_SMALL_CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "attn_implementation": "eager", "use_cache": False,
}  # fmt: skip
_LARGE_CONFIG = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 8000,
}  # fmt: skip


def _make_llama(**changes: Any) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_SMALL_CONFIG, "tie_word_embeddings": False, **changes})
    )


def _make_npt(**changes: Any) -> nn.Module:
    from memprof.workload.npt_layers import add_npt

    model = _make_llama(**changes)
    add_npt(model, TargetSpec(model="llama", npt="dense", npt_rank=4))
    return model


def _make_gemma2(**changes: Any) -> nn.Module:
    import transformers

    return transformers.Gemma2ForCausalLM(
        # A soft cap as large as the logits, so that it has an effect.
        transformers.Gemma2Config(**{**_SMALL_CONFIG, "head_dim": 8, "final_logit_softcapping": 0.5, **changes})
    )


# A tied head; a head of its own; a tied head under a soft cap; a head with a bias in a model that returns tuples; and a
# frozen model with NPT components whose weight delta is dense.
SPECIMENS = {
    "gpt2": Specimen(
        "gpt2",
        _make_gpt2,
        lambda: _make_gpt2(n_embd=128, n_layer=4, vocab_size=8000, n_positions=1024),
        VOCAB_SIZE,
        _CASES,
    ),
    "llama": Specimen("llama", _make_llama, lambda: _make_llama(**_LARGE_CONFIG), VOCAB_SIZE, _CASES),
    "gemma2": Specimen("gemma2", _make_gemma2, lambda: _make_gemma2(**_LARGE_CONFIG, head_dim=32), VOCAB_SIZE, _CASES),
    "handwritten": Specimen(
        "handwritten", Handwritten, lambda: Handwritten(8000, 128, 4, 1024), VOCAB_SIZE, _HANDWRITTEN_CASES
    ),
    "npt": Specimen(
        "npt", _make_npt, lambda: _make_npt(**_LARGE_CONFIG), VOCAB_SIZE, _CASES, peak_tokens=256, kind="npt"
    ),
}


def find_specimen(name: str, notes: list[str], trust_remote_code: bool = False) -> Specimen:
    """Return one of `SPECIMENS`, or any causal language model that `memprof profile --model` takes.

    `notes` receives notes on the model. Raises UsageError: the model does not exist or is no causal language model."""
    if name in SPECIMENS:
        return SPECIMENS[name]
    source = find_source(make_spec(name, trust_remote_code))
    check_task(name, source)
    assert source.vocab_size is not None
    notes += source.notes
    limit = source.max_positions or 1024
    build = functools.partial(_build_for_training, source.build)
    return Specimen(source.name, build, build, source.vocab_size, _CASES, min(NUM_TOKENS, limit), min(512, limit))


def _build_for_training(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without KV cache, as `memprof profile` and transformers' Trainer train it."""
    model = build()
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model


def make_batches(specimen: Specimen, case: str, seed: int) -> list[dict[str, Any]]:
    """Return the micro-batches of one step for a case of `specimen.cases`: one, or two for "accumulation"."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (specimen.tokens, specimen.tokens // 2) if case == "accumulation" else (specimen.tokens,)
    micro_batches: list[dict[str, Any]] = []
    for tokens in lengths:
        ids = torch.randint(0, min(specimen.vocab_size, 100), (2, tokens), generator=generator)
        labels = ids.clone()
        batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if case in ("ignored labels", "accumulation"):
            labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED_LABEL
        if case == "all ignored":
            labels.fill_(IGNORED_LABEL)
        if case == "padding":
            mask = torch.ones_like(ids)
            mask[1, tokens // 2 :] = 0
            labels[mask == 0] = IGNORED_LABEL
            batch["attention_mask"] = mask
        micro_batches.append(batch)
    if case == "accumulation":
        num_items = sum(int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in micro_batches)
        for batch in micro_batches:
            batch["num_items_in_batch"] = num_items
    return micro_batches
