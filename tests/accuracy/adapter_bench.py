"""The benchmark of can-i-finetune-this: LoRA on a checkpointed model, in half precision or in 4 bits, one batch a step.

Written after src/canifinetune/bench/runner.py of github.com/DaoyuanLi2816/can-i-finetune-this at 053ce9e: the model in
bfloat16 is moved to the GPU, or loaded onto it in 4 bits and prepared by PEFT; checkpointing is switched on, PEFT
attaches its float32 adapters, and the loop keeps batch and outputs until the next ones replace them. The optimizer is
bitsandbytes' paged 8-bit AdamW; below 100,000 elements its state is not paged (bitsandbytes/optim/optimizer.py).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from memprof.spec import TargetSpec


@dataclass(frozen=True)
class Bench:
    """One benchmark: what is built, and what the loop does with it."""

    build: Callable[[], nn.Module]
    vocabulary: int
    length: int
    rank: int
    targets: tuple[str, ...]
    steps: int = 3
    in_4_bits: bool = False  # `build` gives a quantized model that is on the GPU.
    checkpointing: bool = True
    batch_size: int = 1


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def causal_lm(key: str, quantize: str | None = None) -> nn.Module:
    """A model of the catalog in bfloat16; quantized, it is on the GPU as transformers loads it for an adapter."""
    from memprof.workload.models import find_source

    adapter = None if quantize is None else "lora"
    return find_source(TargetSpec(model=key, dtype="bfloat16", quantize=quantize, adapter=adapter)).build()


def _tiny_gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=2, n_head=2)
    model: nn.Module = transformers.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)
    return model


QWEN = Bench(lambda: causal_lm("qwen2.5-0.5b"), 151_936, 1024, 16, ATTENTION)
QLORA = Bench(lambda: causal_lm("qwen2.5-0.5b", "nf4"), 151_936, 1024, 16, ATTENTION, in_4_bits=True)
QLORA_1B = dataclasses.replace(QLORA, build=lambda: causal_lm("qwen2.5-1.5b", "nf4"))
QLORA_7B = dataclasses.replace(QLORA, build=lambda: causal_lm("qwen2.5-7b", "nf4"), vocabulary=152_064)
TINY = Bench(_tiny_gpt2, 50_257, 128, 8, ("c_attn", "c_proj"))


def train(bench: Bench, snapshot: Callable[[str], None]) -> None:
    """The benchmark on "cuda"; `snapshot` is called with the names that it gives to its readings."""
    import bitsandbytes
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = bench.build()
        if bench.in_4_bits:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=bench.checkpointing)
        else:
            model = model.to("cuda")
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        snapshot("after_load")
        config = peft.LoraConfig(r=bench.rank, lora_alpha=16, target_modules=list(bench.targets), task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    snapshot("after_lora_attach")
    optimizer = bitsandbytes.optim.PagedAdamW8bit([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model.train()
    for step in range(bench.steps):
        tokens = torch.randint(0, bench.vocabulary, (bench.batch_size, bench.length))
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
