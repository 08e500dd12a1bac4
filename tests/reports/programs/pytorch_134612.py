# pytorch/pytorch#134612: torch.func.grad keeps every result of a chain until its end, torch.autograd.grad does not.
# resolved: open in torch; torch.autograd.grad takes 92 MiB where torch.func.grad takes 236.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: autograd.grad
import torch


def wave(x):
    for _ in range(10):
        x = x.sin().cos()
    return x.sum()


x = torch.rand(8192, 8192, requires_grad=True, device="cuda")
slope = torch.func.grad(wave)(x)  # <- cause
print(slope.norm())
