# At the end the weights are cloned on the GPU, and cloned again in half precision, before they are written.
# fits: no
# exit: 3
# step: 4
# run: --gpu-vram 2
# why: eleven layers of 64 MiB are 704, gradients are let go of; clones are 704 more, and of 1622 are left 214 for
#      halves of 352, after the fourth step.
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(11)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    loss = net(torch.randn(512, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = {name: value.clone() for name, value in net.state_dict().items()}
halves = {name: value.half() for name, value in weights.items()}
torch.save(halves, "halves.pt")
