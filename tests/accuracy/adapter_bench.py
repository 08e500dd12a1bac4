"""The benchmark of can-i-finetune-this: LoRA on a checkpointed model, three steps, one batch each.

Written after src/canifinetune/bench/runner.py of github.com/DaoyuanLi2816/can-i-finetune-this at 053ce9e: the model in
bfloat16 is moved to the card, checkpointing is switched on, PEFT attaches its float32 adapters, and the loop keeps
batch and outputs until the next ones replace them. The optimizer is bitsandbytes' paged 8-bit AdamW; below 100,000
elements its state is not paged (bitsandbytes/optim/optimizer.py), and all adapters here are smaller.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

BLOCK = 256
"""Elements that share a scale in the 8-bit state."""
SMALLEST_QUANTISED = 4096
"""Elements from which on the state has 8 bits."""


@dataclass(frozen=True)
class Bench:
    """One benchmark: what is built, and what the loop does with it."""

    build: Callable[[], nn.Module]
    vocabulary: int
    length: int
    rank: int
    targets: tuple[str, ...]
    steps: int = 3


class EightBitAdamW(torch.optim.Optimizer):
    """What the 8-bit AdamW keeps on the card: codes, their scales, and one table of 256 numbers for each moment."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if not self.tables:
            self.tables = [torch.zeros(256, device="cuda") for _ in range(2)]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self._first_state(parameter))

    def _first_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if parameter.numel() < SMALLEST_QUANTISED:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        blocks = -(-parameter.numel() // BLOCK)
        return {
            **{name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")},
            **{name: torch.zeros(blocks, device="cuda") for name in ("absmax1", "absmax2")},
        }


def train(bench: Bench, snapshot: Callable[[str], None]) -> None:
    """The benchmark on "cuda"; `snapshot` is called with the names that it gives to its readings."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = bench.build().to("cuda")
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        snapshot("after_load")
        config = peft.LoraConfig(r=bench.rank, lora_alpha=16, target_modules=list(bench.targets), task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    snapshot("after_lora_attach")
    optimizer = EightBitAdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    model.train()
    for step in range(bench.steps):
        tokens = torch.randint(0, bench.vocabulary, (1, bench.length))
        batch = {name: tokens.clone() for name in ("input_ids", "labels")}
        batch["attention_mask"] = torch.ones_like(tokens)
        batch = {name: value.to("cuda") for name, value in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.detach().to("cpu").item()
        if step == 0:
            snapshot("after_first_forward")
        loss.backward()
        if step == 0:
            snapshot("after_first_backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            snapshot("after_first_optimizer_step")
    snapshot("after_run")
