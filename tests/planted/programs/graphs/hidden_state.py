# Truncated backpropagation without detach: the hidden state has the graph of all chunks.
# fits: no
# exit: 3
# step: 11
# grows: 128
# run: --gpu-vram 2
# why: the graph of a chunk holds its input and its state, 128 MiB. 1622 less weights 64, gradients of two states and
#      of the weights twice, 4 * 64, and workspaces 17 leave 1285: 10 of 128.
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x, state):
        return torch.tanh(self.inner(x) + state)


cell = Cell(4096).cuda()
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
state = torch.zeros(4096, 4096, device="cuda")
for chunk in range(30):
    x = torch.randn(4096, 4096, device="cuda")
    state = cell(x, state)  # <- culprit
    state.sum().backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
