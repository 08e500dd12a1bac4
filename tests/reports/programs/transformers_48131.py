# huggingface/transformers#48131: the load-balancing loss makes one one_hot of the routers of all layers.
# resolved: the loss is computed layer by layer, so that no such tensor exists.
# run: --gpu h100-80gb
# first: does-not-fit
# fix: in parts | in chunks | layer by layer
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F

LAYERS, EXPERTS, TOP_K, TOKENS = 48, 128, 8, 131072


class Router(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, hidden):
        return hidden + self.mix(hidden), self.gate(hidden)


class Experts(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Router(width) for _ in range(LAYERS))

    def forward(self, hidden):
        gates = []
        for layer in self.layers:
            hidden, gate = layer(hidden)
            gates.append(gate)
        return hidden, gates


def balance(gates, attended):
    weights = torch.cat(gates).softmax(-1)
    chosen = weights.topk(TOP_K, dim=-1).indices
    mask = F.one_hot(chosen, EXPERTS)  # <- cause
    kept = attended.repeat(LAYERS)[:, None, None].expand(mask.shape)
    share = (mask.float() * kept).sum(0) / kept.sum(0)
    return EXPERTS * (share * weights.mean(0)).sum()


model = Experts().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(TOKENS, 64, device="cuda", dtype=torch.bfloat16)
    attended = torch.ones(TOKENS, device="cuda")
    out, gates = model(x)
    loss = out.float().square().mean() + 0.001 * balance(gates, attended)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
