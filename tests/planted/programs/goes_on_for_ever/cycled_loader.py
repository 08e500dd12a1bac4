# A loader is begun again and again, and the features of its batches are kept in host memory alone.
# fits: yes
# exit: 0
# ends: no
# run: --gpu-vram 2
# why: 5 * 64 MiB of 1622, in every step.
import torch
from torch.utils.data import DataLoader


def endless(loader):
    while True:
        yield from loader


loader = endless(DataLoader(torch.zeros(64, 4096), batch_size=16))
net = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
features = []
for batch in loader:
    out = net(batch.cuda())
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    features.append(out.detach().mean(0).cpu())
