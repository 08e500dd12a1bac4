# pytorch/functorch#1058: jacrev of a function with many outputs takes all rows of the jacobian at once.
# resolved: jacrev in chunks of rows (chunk_size), which was added for such reports.
# run: --gpu a100-40gb
# first: does-not-fit
# fix: chunk_size
# not: micro-batch
import torch
from torch.func import jacrev

POINTS = 4096

places = torch.rand(POINTS, 3, device="cuda")
values = torch.rand(POINTS, device="cuda")


def residual(scales):
    distance = (places[:, None, 0] - places[None, :, 0]).square() * scales
    return torch.exp(-distance) @ values - values


scales = torch.ones(POINTS, device="cuda")
jacobian = jacrev(residual)(scales)  # <- cause
print(jacobian.shape)
