# A subclass of tensors that passes itself on as a plain tensor, as image libraries have it.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 64 MiB for weights, gradients, batch, output and what the square needs: less than 9 of them.
import torch
from torch import nn


class Picture(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, (torch.Tensor,), args, kwargs or {})


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(4096, 4096, device="cuda").as_subclass(Picture)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
