# A wrapper around two halves of a weight, which puts them together where an operator asks for it.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: halves of 32 MiB, the weight of 64 that they are put together to, its gradient, activations of 16.
import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class Halves(torch.Tensor):
    @staticmethod
    def __new__(cls, upper, lower):
        size = (upper.shape[0] + lower.shape[0], upper.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=upper.dtype, device=upper.device)

    def __init__(self, upper, lower):
        self.upper, self.lower = upper, lower

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def whole(value):
            return torch.cat([value.upper, value.lower])

        return func(*tree_map_only(Halves, whole, args), **tree_map_only(Halves, whole, kwargs or {}))


weight = Halves(torch.randn(2048, 4096, device="cuda"), torch.randn(2048, 4096, device="cuda"))
head = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(8):
    features = torch.randn(1024, 4096, device="cuda") @ weight
    head(features).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
