# pytorch/pytorch#51978: a Function that takes autograd.grad within its backward leaks under create_graph=True.
# resolved: as for any backward(create_graph=True): torch.autograd.grad, or .grad = None.
# run: --gpu rtx-4090
# first: memory-growth | does-not-fit
# fix: autograd.grad | .grad = None
import torch


class Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, start, *parameters):
        ctx.function = function
        ctx.save_for_backward(start, *parameters)
        return start.clone()

    @staticmethod
    def backward(ctx, gradient):
        start, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            copies = [parameter.clone().requires_grad_() for parameter in parameters]
            result = ctx.function(start, *copies)
        found = torch.autograd.grad(result, copies, gradient, create_graph=torch.is_grad_enabled())
        return None, None, *found


def add(x, y):
    return x + y


def check(size):
    start = torch.zeros(size, size, device="cuda")
    other = start.clone().requires_grad_()
    loss = (Implicit.apply(add, start, other) ** 2).sum()
    loss.backward(create_graph=True)  # <- cause


for _ in range(30):
    check(8192)
