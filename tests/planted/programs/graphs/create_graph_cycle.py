# backward(create_graph=True) makes a cycle of a leaf and its gradient, which set_to_none=False does not break.
# fits: no
# exit: 3
# step: 19
# grows: 64
# run: --gpu-vram 2
# why: the leaf is 32 MiB and its gradient 32; the second backward lets go of what its graph had saved. 1622 less
#      weights 64, gradients, which are added out of place, 128, and 6 of 32 in the two backwards leave 1238: 19 of 64.
import gc

import torch

gc.disable()
net = torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False), torch.nn.Tanh()).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(40):
    x = torch.randn(2048, 4096, device="cuda", requires_grad=True)
    net(x).sum().backward(create_graph=True)  # <- culprit
    x.grad.norm(2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
