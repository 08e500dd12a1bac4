# The loss of a critic is computed of images that have the generator's graph, whose gradients are then dropped.
# fits: yes
# exit: 0
# run: --gpu-vram 6
# why: the generator's layers keep 16,384 x 4,096 numbers each, 256 MiB, through the critic's forward and backward.
import torch
from torch import nn

generator = nn.Sequential(
    nn.Linear(64, 4096), nn.Sigmoid(), nn.Linear(4096, 4096), nn.Sigmoid(), nn.Linear(4096, 1024)
).cuda()
critic = nn.Sequential(nn.Linear(1024, 64), nn.Sigmoid(), nn.Linear(64, 1)).cuda()
of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(6):
    fake = generator(torch.randn(16384, 64, device="cuda"))  # <- culprit
    loss = critic(fake).mean() - critic(torch.randn(16384, 1024, device="cuda")).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    del fake, loss
    loss = -critic(generator(torch.randn(256, 64, device="cuda"))).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
    print(step, loss.item())
