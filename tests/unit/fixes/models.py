"""Small real models and batches, and runs that are made up."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from memprof.device.catalog import find_gpu
from memprof.flows.ladder.runs import Runs

VOCAB = 97


def gpt2(vocab: int = VOCAB, **config: object) -> nn.Module:
    """Tied head."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=4, n_head=2, vocab_size=vocab, n_positions=256, bos_token_id=1, eos_token_id=2,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **config,
        )
    )  # fmt: skip


_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}


def llama(**config: object) -> nn.Module:
    """A head of its own."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_DECODER, "tie_word_embeddings": False, **config})
    )


def gemma2(**config: object) -> nn.Module:
    """Tied head, soft cap on the logits."""
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**{**_DECODER, "head_dim": 8, "final_logit_softcapping": 3.0, **config})
    )


class Handwritten(nn.Module):
    """A decoder as people write it: a head with a bias, its own cross-entropy, a tuple of logits and loss."""

    def __init__(self, vocab: int = VOCAB, transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed = transposed
        self.embed = nn.Embedding(vocab, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(32, vocab)

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        if self.transposed:
            return logits, functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


MODELS = {"gpt2": gpt2, "llama": llama, "gemma2": gemma2}


def batch(rows: int = 2, tokens: int = 13, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Some labels ignored."""
    torch.manual_seed(1)
    ids = torch.randint(0, vocab, (rows, tokens))
    labels = ids.clone()
    labels[0, : tokens // 3] = -100
    return {"input_ids": ids, "labels": labels}


def state(model: nn.Module) -> dict[str, object]:
    """Everything that `undo` must restore, comparable with ==: parameters, flags, attributes, hooks."""
    modules = {
        name: (
            type(module),
            {key: id(value) for key, value in vars(module).items() if not key.startswith("_parameters")},
            {key: dict(value) for key, value in vars(module).items() if key.endswith("_hooks") and value},
        )
        for name, module in model.named_modules()
    }
    parameters = {
        name: (id(p), p.dtype, p.requires_grad, p.device, p.detach().double().tolist())
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    hooks = {n: dict(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for n, p in model.named_parameters()}
    config = getattr(model, "config", None)
    return {
        "modules": modules,
        "parameters": parameters,
        "hooks": hooks,
        "config": None if config is None else config.to_dict(),
        "attention": None if config is None else config._attn_implementation,
    }


class MadeUpRuns(Runs):
    """Without commands; a subclass has `_run`."""

    def __init__(self) -> None:
        super().__init__(find_gpu("rtx-4090"))

    def format_command(self, fixes: Any, *, fits: bool | None) -> str:
        return ""

    def _replay_with_fixes(self, trace: Any, fixes: Any) -> Any:
        return trace

    def run_in_parallel(self, sets: Any) -> None:
        return None

    def check_fixes(self, fixes: Any) -> None:
        return None

    def in_force(self) -> frozenset[str]:
        return frozenset()
