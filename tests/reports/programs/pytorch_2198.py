# pytorch/pytorch#2198: the hidden state of an LSTM is carried over from batch to batch with its whole history.
# resolved: detach it after each batch.
# run: --gpu rtx-3060-12gb
# first: memory-growth | idle-memory
# fix: .detach()
# also: fragmentation
import torch
from torch import nn

lstm = nn.LSTM(256, 1024, num_layers=2).cuda()
head = nn.Linear(1024, 64).cuda()
optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.01)
for _ in range(3):
    hidden = None
    for _ in range(40):
        x = torch.randn(32, 64, 256, device="cuda")
        out, hidden = lstm(x, hidden)  # <- cause
        loss = head(out).square().mean()
        loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
