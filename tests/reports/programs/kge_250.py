# uma-pi1/kge#250: triples are scored with all entities, of which ten negatives are chosen.
# resolved: only the sampled triples are scored.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: sampled negatives
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F

ENTITIES, RELATIONS = 14_541, 237


class RotatE(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.entities, self.relations = nn.Embedding(ENTITIES, dim), nn.Embedding(RELATIONS, dim // 2)

    def score(self, s, p, o):
        s_re, s_im = s.chunk(2, -1)
        o_re, o_im = o.chunk(2, -1)
        p_re, p_im = torch.cos(p), torch.sin(p)
        re, im = s_re * p_re - s_im * p_im, s_re * p_im + s_im * p_re
        diff_re = re[:, None] - o_re  # <- cause
        diff_im = im[:, None] - o_im
        diff = torch.stack((diff_re, diff_im), dim=0).norm(dim=0)
        return -diff.sum(-1)

    def score_sp(self, s, p):
        return self.score(self.entities(s), self.relations(p), self.entities.weight[None])


class NegativeSamplingLoss(nn.Module):
    def __init__(self, model, negatives=10):
        super().__init__()
        self.model, self.negatives = model, negatives

    def forward(self, triples):
        s, p, o = triples.T
        negatives = torch.randint(0, ENTITIES, (len(s), self.negatives), device=s.device)
        scores = self.model.score_sp(s, p)
        chosen = scores.gather(1, torch.cat([o[:, None], negatives], dim=1))
        labels = torch.zeros_like(chosen)
        labels[:, 0] = 1
        return F.binary_cross_entropy_with_logits(chosen + 12, labels)


model = RotatE().cuda()
loss_fn = NegativeSamplingLoss(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    triples = torch.stack(
        [torch.randint(0, ENTITIES, (512,)), torch.randint(0, RELATIONS, (512,)), torch.randint(0, ENTITIES, (512,))], 1
    ).cuda()
    loss = loss_fn(triples)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
