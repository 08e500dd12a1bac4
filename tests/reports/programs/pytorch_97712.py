# pytorch/pytorch#97712: an optimizer's step over all parameters at once takes as much as they do.
# resolved: foreach=False, or fused=True
# run: --gpu rtx-4090
# first: optimizer-step-temporaries
# fix: fused-optimizer
import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda"
cfg = GPT2Config(n_layer=36, n_embd=1664, n_head=16, n_positions=512, vocab_size=16000)
with torch.device(device):
    model = GPT2LMHeadModel(cfg)
print(sum(p.numel() for p in model.parameters()) / 1e9)
model.gradient_checkpointing_enable()
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    ids = torch.randint(0, 16000, (1, 256), device=device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    opt.step()  # <- cause
    opt.zero_grad(set_to_none=True)
    print(step, loss.item())
