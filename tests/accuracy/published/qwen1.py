"""Qwen's table of memory for fine-tuning Qwen-7B (README.md of github.com/QwenLM/Qwen at 2df8e8a).

The run follows the repository's finetune.py: Trainer in bfloat16, one sequence, eight micro-batches to a step,
checkpointing (finetune/finetune_lora_single_gpu.sh), PEFT's LoRA of rank 64 and dropout 0.05 on c_attn, c_proj, w1 and
w2; "emb" trains a copy of the embedding and of the head as well (`modules_to_save`), which is why the input of the
embedding requires gradients there too. The model is written after the published geometry (config.json of Qwen/Qwen-7B:
32 layers, width 4,096, 32 heads, 22,016 / 2 hidden channels, a vocabulary of 151,936, untied) with flash attention;
weights are loaded in bfloat16, and adapters are in float32, to which their inputs are cast: PEFT was not pinned, and
0.5 was its release when the table appeared (7 October 2023; 0.6 has them in the dtype of what they adapt).

What the README's "memory (GB)" measures is not said. It is compared as what nvidia-smi shows: reserved, in GiB, and the
context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.accuracy.published.prediction import GPUS, RANKS, UNSAID, Prediction, not_predicted, run
from tests.accuracy.published.rows import Row

WIDTH, LAYERS, HEADS, INNER, VOCABULARY = 4096, 32, 32, 11_008, 151_936
RANK, DROPOUT, MICRO_BATCHES = 64, 0.05, 8
SIMULATED_MICRO_BATCHES = 2  # The second and all later ones are alike: gradients are there already.
EPSILON = 1e-6
_UNKNOWN = "the source does not say what the table measures; compared with reserved and a context of 0.42 GiB"

_UNPINNED = (
    "the source does not say what the table measures, and pins neither PEFT nor DeepSpeed: adapters of PEFT 0.5 "
    "(float32) are simulated; those of 0.6 (bfloat16) take 0.9 to 1.8 GiB less up to 2,048 tokens, and 5.6 less at "
    "8,192; the model's own code is only on the hub"
)


def finetuning(row: Row) -> Prediction:
    if not row.parallel.startswith("1 node x 1"):
        return not_predicted(RANKS)
    length, embedding = int(row.seq), row.method == "LoRA (emb)"
    done = run(lambda gpu: train(length, embedding), GPUS[row.gpu])
    return Prediction(done.device_used, unit_bytes=2**30, basis=_UNKNOWN, explanation=_UNPINNED, differs=UNSAID)


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False, dtype=torch.float32)
        self.up = nn.Linear(RANK, outputs, bias=False, dtype=torch.float32)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result = self.base(states)
        result += self.up(self.down(self.dropout(states.float()))) * 0.25
        return result


class Norm(nn.Module):
    """In float32, as the model's own code does it where flash-attn's fused kernel is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return normed.type_as(states) * self.weight


def rotated(states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = tables
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).type_as(states)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = Norm(), Norm()
        self.c_attn, self.attn_proj = Adapted(WIDTH, 3 * WIDTH, bias=True), Adapted(WIDTH, WIDTH)
        self.w1, self.w2, self.c_proj = Adapted(WIDTH, INNER), Adapted(WIDTH, INNER), Adapted(INNER, WIDTH)

    def forward(self, states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = states.shape
        parts = self.c_attn(self.ln_1(states)).split(WIDTH, dim=2)
        query, key, value = (part.view(batch, length, HEADS, -1) for part in parts)
        query, key = rotated(query, tables), rotated(key, tables)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)), is_causal=True)
        states = self.attn_proj(mixed.transpose(1, 2).contiguous().view(batch, length, -1)) + states
        normed = self.ln_2(states)
        return states + self.c_proj(self.w1(normed) * F.silu(self.w2(normed)))


class Qwen(nn.Module):
    def __init__(self, embedding: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = Norm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)
        self.trained = nn.ModuleDict()
        if embedding:  # PEFT keeps the original beside the copy that it trains
            self.trained["wte"] = nn.Embedding(VOCABULARY, WIDTH)
            self.trained["lm_head"] = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wte, head = (self.trained["wte"], self.trained["lm_head"]) if self.trained else (self.wte, self.lm_head)
        states = wte(tokens)
        if not states.requires_grad:
            states.requires_grad_()
        tables = self.tables(tokens.shape[1])
        for block in self.h:
            states = checkpoint(block, states, tables, use_reentrant=True)
        logits = head(self.ln_f(states))
        shifted = logits[..., :-1, :].contiguous()
        targets = labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, VOCABULARY), targets.view(-1)), logits

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.zeros(1, length, 1, WIDTH // HEADS, device="cuda")
        return angles.cos(), angles.sin()


class AdamWOfTorch20(torch.optim.Optimizer):
    """AdamW over all parameters at once as torch 2.0 has it (torch/optim/adamw.py there, _multi_tensor_adamw): epsilon
    is added out of place, so that the step holds two temporaries as large as what is trained."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        gradients = [p.grad for p in parameters]
        averages, squares = ([self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(parameters, 0.99)
        torch._foreach_mul_(averages, 0.9)
        torch._foreach_add_(averages, gradients, alpha=0.1)
        torch._foreach_mul_(squares, 0.95)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.05)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 1.0)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, averages, denominators, -3e-4)


def train(length: int, embedding: bool, steps: int = 2) -> None:
    """Trainer's steps: autocast, mean over micro-batches, clipping, AdamW. The README says torch 2.0."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = Qwen(embedding).to("cuda")
    finally:
        torch.set_default_dtype(torch.float32)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamWOfTorch20(trained)
    for _ in range(steps):
        for _ in range(SIMULATED_MICRO_BATCHES):
            _micro_batch(model, length)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()


def _micro_batch(model: nn.Module, length: int) -> None:
    tokens, labels = (torch.zeros(1, length, dtype=torch.int64).to("cuda") for _ in range(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, logits = model(tokens, labels)
    # Accelerate hands the outputs out in float32 (convert_outputs_to_fp32); Trainer keeps the loss alone.
    logits = logits.float()
    del logits
    (loss / MICRO_BATCHES).backward()
