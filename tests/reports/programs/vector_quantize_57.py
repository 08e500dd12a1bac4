# lucidrains/vector-quantize-pytorch#57: a running variance keeps the graph of every step.
# resolved: .detach() before it is stored
# run: --gpu rtx-4090
# first: memory-growth
# fix: .detach()
import torch
import torch.nn as nn
import torch.nn.functional as F


class VQ(nn.Module):
    def __init__(self, dim=256, codes=1024, decay=0.99):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(codes, dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.decay = decay

    def forward(self, z):
        batch_mean = z.mean(0)
        batch_var = z.var(0)
        if self.training:
            self.var = self.decay * self.var + (1 - self.decay) * batch_var  # <- cause
            self.mean = self.decay * self.mean + (1 - self.decay) * batch_mean
        z = (z - self.mean.detach()) / (self.var.detach() + 1e-5).sqrt()
        idx = torch.cdist(z, self.codebook).argmin(1)
        q = self.codebook[idx]
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss


enc = nn.Sequential(nn.Linear(768, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)).cuda()
dec = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 768)).cuda()
vq = VQ().cuda()
opt = torch.optim.AdamW([*enc.parameters(), *dec.parameters(), *vq.parameters()], lr=3e-4)
for step in range(12000):
    x = torch.randn(4096, 768).cuda()
    q, commit = vq(enc(x))
    loss = F.mse_loss(dec(q), x) + commit
    opt.zero_grad()
    loss.backward(retain_graph=False)
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
