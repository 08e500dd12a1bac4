# Mixed precision with a gradient scaler and a learning rate schedule: all of it is there after the first step.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 128 MiB, gradients 128, moments 256, half copies 64, activations 5 of 32: 736 of 1622.
import torch
from torch import nn

device = torch.device("cuda")
net = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
for step in range(50):
    x = torch.randn(4096, 4096, device=device)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
