# pytorch/pytorch#118883: the gradient of a sparse sampled product is made dense before it is masked.
# resolved: open in torch; products of the gathered rows give the same values.
# run: --gpu l40
# first: does-not-fit
# fix: sparse | gather | rows
# not: micro-batch
import torch

ROWS, WIDTH, PER_ROW = 200000, 16, 4

left = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
right = torch.randn(WIDTH, ROWS, device="cuda", requires_grad=True)
offsets = torch.arange(0, ROWS * PER_ROW + 1, PER_ROW)
columns = torch.randint(0, ROWS, (ROWS, PER_ROW)).sort(1).values.flatten()
mask = torch.sparse_csr_tensor(offsets, columns, torch.zeros(ROWS * PER_ROW), size=(ROWS, ROWS)).cuda()
scores = torch.sparse.sampled_addmm(mask, left, right)  # <- cause
scores.sum().backward()
print(left.grad.norm())
