# deepset-ai/FARM#219: a cross-validation keeps the model of each fold on the GPU.
# resolved: model.cpu() after each fold
# run: --gpu rtx-3080
# first: idle-memory
# fix: .cpu()
# also: fragmentation optimizer-step-temporaries
# not: micro-batch
import torch
from torch import nn
from transformers import BertConfig, BertModel

device = "cuda"
FOLDS, BATCH, LENGTH = 5, 16, 128


class Classifier(nn.Module):
    def __init__(self, config, labels=4):
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.output = nn.Linear(config.hidden_size, labels)

    def forward(self, src, tgt=None):
        logits = self.output(self.encoder(input_ids=src).last_hidden_state[:, 0])
        if tgt is None:
            return logits
        return nn.functional.cross_entropy(logits, tgt), logits


def train_fold(model, optimizer, scheduler, src, tgt):
    model.train()
    for i in range(0, len(src), BATCH):
        model.zero_grad()
        loss, _ = model(src[i : i + BATCH].to(device), tgt[i : i + BATCH].to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, src, tgt):
    model.eval()
    hits = 0
    for i in range(0, len(src), BATCH):
        pred = model(src[i : i + BATCH].to(device)).argmax(1).cpu()
        hits += (pred == tgt[i : i + BATCH]).sum().item()
    return hits / len(src)


config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
src, tgt = torch.randint(0, 30000, (240, LENGTH)), torch.randint(0, 4, (240,))
fold_models = []
for fold in range(FOLDS):
    held = torch.arange(len(src)) % FOLDS == fold
    model = Classifier(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(2):
        loss = train_fold(model, optimizer, scheduler, src[~held], tgt[~held])
    print(fold, loss, evaluate(model, src[held], tgt[held]))
    fold_models.append(model)  # <- cause
    torch.cuda.empty_cache()
print(sum(evaluate(model, src[:32], tgt[:32]) for model in fold_models) / FOLDS)
