"""mamba-minimal, trained as a language model."""

import torch
from model import Mamba, ModelArgs

model = Mamba(ModelArgs(d_model=256, n_layer=4, vocab_size=5000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    tokens = torch.randint(0, 5000, (2, 129), device="cuda")
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
