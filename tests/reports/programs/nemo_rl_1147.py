# NVIDIA-NeMo/RL#1147: gradients of a policy lie beside what the next rollout needs.
# resolved: zero_grad() after the training, before the rollout.
# run: --gpu rtx-4090
# first: idle-memory | does-not-fit
# fix: zero_grad
# also: fragmentation
import torch
from torch import nn

WORDS, WIDTH, LAYERS = 32000, 1536, 24


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def roll_out(policy, prompts):
    logits = policy.head(policy(prompts)[:, -1:])
    return torch.cat([prompts, logits.argmax(-1)], dim=1)


policy = Policy().cuda()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
for _ in range(4):
    sequences = roll_out(policy, torch.randint(0, WORDS, (336, 511), device="cuda"))
    optimizer.zero_grad()  # <- cause
    for part in sequences[:4].split(1):
        logits = policy.head(policy(part))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten())
        loss.backward()
    optimizer.step()  # <- cause
