# huggingface/diffusers#9850: a model that was left in eval mode does no gradient checkpointing.
# resolved: model.train() before training goes on
# run: --gpu rtx-4090
# first: left-in-eval-mode
# fix: model.train()
# not: activation-checkpointing
import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda"
cfg = GPT2Config(n_layer=24, n_embd=1024, n_head=16, n_positions=1024, vocab_size=8192)
model = GPT2LMHeadModel(cfg).to(device)
model.gradient_checkpointing_enable()
model.config.use_cache = False
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
train = torch.randint(0, 8192, (32, 1024))
val = torch.randint(0, 8192, (8, 1024))


def validate():
    model.eval()  # <- cause
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(val), 4):
            b = val[i : i + 4].to(device)
            total += model(input_ids=b, labels=b).loss.item()
    return total


for epoch in range(3):
    for i in range(0, len(train), 8):
        b = train[i : i + 8].to(device)
        loss = model(input_ids=b, labels=b).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(epoch, loss.item(), validate())
