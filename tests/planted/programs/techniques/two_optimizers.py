# A generator and its critic; the generator's pictures are kept with their graphs for a sheet of samples.
# fits: no
# exit: 3
# step: 12
# grows: 128
# run: --gpu-vram 2
# why: a step keeps the noise and the pictures, 128 MiB. 1622 less weights 64, two gradients 128 and workspaces 17
#      leave 1413: 11 of 128.
import torch
from torch import nn

generator = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Tanh()).cuda()
critic = nn.Linear(4096, 1, bias=False).cuda()
of_generator = torch.optim.SGD(generator.parameters(), lr=1e-4)
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-4)
sheet = []
for _ in range(50):
    noise = torch.randn(4096, 4096, device="cuda")
    pictures = generator(noise)
    of_critic.zero_grad()
    critic(pictures.detach()).mean().backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(pictures).mean()).backward(retain_graph=True)
    of_generator.step()
    sheet.append(pictures)  # <- culprit
