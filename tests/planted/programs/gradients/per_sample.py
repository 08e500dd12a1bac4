# Gradients of single samples by torch.func, which do not fit the batch that is requested.
# fits: no
# exit: 3
# step: 1
# run: --gpu-vram 2
# why: 32 samples of a gradient of 64 MiB are 2 GiB.
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, sample):
    return functional_call(model, parameters, (sample[None],)).square().mean()


for _ in range(10):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    gradients = vmap(grad(loss_of), in_dims=(None, 0))(parameters, torch.randn(32, 4096, device="cuda"))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].mean(0)
    optimizer.step()
