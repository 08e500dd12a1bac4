# pytorch/pytorch#48049: one autocast around a whole generation keeps a copy of every weight, in half precision.
# resolved: leave the autocast context for each batch, or cache_enabled=False; torch caches no views any more.
# run: --gpu rtx-3060-12gb
# first: idle-memory | weight-cache
# fix: cache_enabled=False
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(96)]).cuda().eval()
with torch.no_grad(), torch.autocast("cuda", torch.float16):  # <- cause
    for _ in range(8):
        x = torch.randn(64, 4096, device="cuda")
        print(model(x).shape)
