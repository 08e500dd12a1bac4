# Hugging Face's Trainer with a model that is none of its own, evaluated after each epoch.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights, gradients and two moments of 16 MiB, batches of 16 rows.
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2048, 2048)

    def forward(self, x):
        out = self.inner(x)
        return {"loss": out.square().mean(), "logits": out}


data = [{"x": torch.zeros(2048)} for _ in range(64)]
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=16, eval_strategy="epoch", save_strategy="no",
    report_to=[], disable_tqdm=True, label_names=[],
)  # fmt: skip
Trainer(Net(), arguments, train_dataset=data, eval_dataset=data).train()
