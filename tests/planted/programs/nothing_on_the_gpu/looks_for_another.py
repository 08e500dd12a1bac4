# Asks for the GPU of a Mac, and otherwise takes the CPU.
# fits: none
# exit: 1
# why: nothing is on a GPU.
import torch
from torch import nn

device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.rnn = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, 1000)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


net = Net().to(device)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    ids = torch.randint(0, 1000, (8, 16), device=device)
    nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
