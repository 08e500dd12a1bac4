# Evaluation at the end keeps the logits of all batches, to compute its score of them.
# fits: no
# exit: 3
# run: --gpu-vram 2
# why: 40 batches of 64 MiB are 2560.
import torch
from torch import nn


@torch.inference_mode()
def evaluate(model, batches):
    model.eval()
    logits = []
    for _ in range(batches):
        logits.append(model(torch.randn(4096, 4096, device="cuda")))  # <- culprit
    return torch.cat(logits).mean().item()


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(evaluate(model, 40))
