"""Programs of frameworks for several processes as people write them: one is run, that of the name that is given.

`torchrun --nproc-per-node 4 frameworks.py trainer-fsdp` on GPUs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

LENGTH, VOCABULARY = 32, 512
FSDP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def train(saved: bool = False, **settings: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_strategy": "steps", "save_steps": 2} if saved else {"save_strategy": "no"}
        arguments: Any = {"per_device_train_batch_size": 4, "max_steps": 3, "report_to": [], **saving, **settings}
        trainer = Trainer(llama(), TrainingArguments(folder, logging_steps=1, **arguments), train_dataset=Rows())
        trainer.train()
        if saved:
            trainer.save_model(folder)


def deepspeed_trainer(stage: int) -> None:
    settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    batches = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    train(deepspeed={**settings, **batches}, bf16=True)


def deepspeed_by_hand() -> None:
    import deepspeed

    model = llama()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for _ in range(3):
        ids = torch.zeros(4, LENGTH, dtype=torch.long, device=engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def lightning(strategy: str, **options: Any) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import FSDPStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    chosen = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}, **options) if strategy == "fsdp" else strategy
    loader: Any = torch.utils.data.DataLoader(Rows(), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cuda", devices=4, strategy=chosen, max_steps=3, default_root_dir=folder, logger=False
        )
        trainer.fit(Module(), loader)


def accelerated() -> None:
    """With whatever accelerate's launcher or its settings say."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model: nn.Module = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach()).mean().item()
        if step == 2:
            break
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "trainer-ddp": lambda: train(saved=True),
    "trainer-fsdp1": lambda: train(fsdp="full_shard auto_wrap", fsdp_config={**FSDP, "version": 1}, bf16=True),
    "trainer-fsdp2": lambda: train(
        saved=True, fsdp="full_shard auto_wrap", fsdp_config={**FSDP, "version": 2}, bf16=True
    ),
    "lightning-ddp": lambda: lightning("ddp"),
    "lightning-fsdp": lambda: lightning("fsdp"),
    "accelerate": accelerated,
    "deepspeed-1": deepspeed_by_hand,
    "deepspeed-2": lambda: deepspeed_trainer(2),
    "deepspeed-3": lambda: deepspeed_trainer(3),
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
