# rfeinman/pytorch-minimize#39: the Hessian of a function of 3000 numbers takes all its rows at once.
# resolved: vectorize=False computes one row after the other.
# run: --gpu rtx-4090
# first: does-not-fit
# fix: vectorize
# not: micro-batch
import torch

N, TERMS = 3000, 4000
matrix = torch.randn(TERMS, N, dtype=torch.float64, device="cuda")
target = torch.randn(TERMS, dtype=torch.float64, device="cuda")


def objective(x):
    reading = torch.tanh(matrix * x).sum(1)
    return (reading - target).pow(2).sum()


def newton_step(x):
    hessian = torch.autograd.functional.hessian(objective, x, vectorize=True)  # <- cause
    gradient = torch.autograd.functional.jacobian(objective, x)
    damping = 1e-3 * torch.eye(len(x), dtype=x.dtype, device=x.device)
    return x - torch.linalg.solve(hessian + damping, gradient)


x = torch.zeros(N, dtype=torch.float64, device="cuda")
for iteration in range(3):
    x = newton_step(x)
    print(iteration, objective(x).item())
