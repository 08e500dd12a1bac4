# A trainer of one's own keeps the outputs that its losses are computed of.
# fits: no
# exit: 3
# step: 18
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights and moments 192, batch 64, the square's backward 4 * 64 and workspaces 17 leave 1093: 17
#      of 64.
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Keeping(Trainer):
    outputs = []

    def compute_loss(self, model, inputs, return_outputs=False, **others):
        out = model(**inputs)
        self.outputs.append(out["logits"].detach())  # <- culprit
        return (out["loss"], out) if return_outputs else out["loss"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        out = self.inner(x.repeat(512, 1))
        return {"loss": out.square().mean(), "logits": out}


data = [{"x": torch.zeros(4096)} for _ in range(480)]
arguments = TrainingArguments(
    output_dir="out",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
Keeping(Net(), arguments, train_dataset=data).train()
