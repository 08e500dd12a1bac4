# cornellius-gp/gpytorch#2754: predicting means and variances builds the covariance of all test points with all.
# resolved: evaluate its diagonal only, or predict in batches.
# run: --gpu a100-40gb
# first: does-not-fit
# fix: diagonal | in parts | in chunks | batches of
# not: micro-batch amp-bfloat16
import torch
from torch import nn


class ExactGP(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        self.register_buffer("x", x)
        self.register_buffer("y", y)
        self.scale, self.length, self.noise = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def kernel(self, a, b):
        return self.scale.exp() * torch.exp(-0.5 * torch.cdist(a, b).pow(2) / self.length.exp())  # <- cause

    def factor(self):
        noise = self.noise.exp() * torch.eye(self.x.shape[1], device=self.x.device)
        return torch.linalg.cholesky(self.kernel(self.x, self.x) + noise)

    def loss(self):
        root = self.factor()
        alpha = torch.cholesky_solve(self.y[..., None], root)
        return (self.y[..., None] * alpha).sum() + root.diagonal(dim1=-2, dim2=-1).log().sum()

    def predict(self, test):
        root = self.factor()
        cross = self.kernel(self.x, test)
        mean = cross.mT @ torch.cholesky_solve(self.y[..., None], root)
        half = torch.linalg.solve_triangular(root, cross, upper=False)
        covariance = self.kernel(test, test) - half.mT @ half  # <- cause
        return mean.squeeze(-1), covariance.diagonal(dim1=-2, dim2=-1)


model = ExactGP(torch.randn(3, 818, 16), torch.randn(3, 818)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = model.loss()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    mean, variance = model.predict(torch.randn(3, 80_000, 16, device="cuda"))
    print(mean.shape, variance.shape)
