# sung-yeon-kim/Proxy-Anchor-CVPR2020#14: recall is computed of 10,000 x 60,000 similarities at a time.
# resolved: fewer rows at a time.
# run: --gpu rtx-3070
# first: does-not-fit | evaluation-batch
# fix: in parts | in chunks | batches of | fewer rows
# also: fragmentation evaluation-accumulates
# not: micro-batch activation-checkpointing
import torch
from torch import nn
from torch.nn import functional as F

encoder = nn.Sequential(
    nn.Conv2d(3, 64, 7, 4),
    nn.ReLU(),
    nn.Conv2d(64, 256, 3, 2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 512),
).cuda()
proxies = nn.Parameter(torch.randn(11_318, 512, device="cuda"))
optimizer = torch.optim.AdamW([*encoder.parameters(), proxies], lr=1e-4)


def evaluate(embeddings, labels, rows=20_000):
    embeddings = F.normalize(embeddings)
    hits = []
    for part in embeddings.split(rows):
        similarity = F.linear(part, embeddings)  # <- cause
        near = labels[similarity.topk(1001)[1][:, 1:]]
        hits.append(near.cpu())
    near = torch.cat(hits)
    return [(near[:, :k] == labels.cpu()[:, None]).any(1).float().mean().item() for k in (1, 10, 100, 1000)]


for step in range(4):
    images, labels = torch.randn(90, 3, 224, 224, device="cuda"), torch.randint(0, 11_318, (90,)).cuda()
    similarity = F.linear(F.normalize(encoder(images)), F.normalize(proxies))
    loss = F.cross_entropy(32 * similarity, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
encoder.eval()
with torch.no_grad():
    embeddings = torch.cat([encoder(torch.randn(500, 3, 224, 224, device="cuda")) for _ in range(121)])
    print(evaluate(embeddings, torch.randint(0, 11_316, (len(embeddings),)).cuda()))
