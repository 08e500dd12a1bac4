# cpnota/autonomous-learning-library#144: the replay buffer of an agent has stacked frames, as tensors on the GPU.
# resolved: a buffer on the CPU (store_device), or frames once, as arrays of uint8.
# run: --gpu rtx-3060-12gb
# first: memory-growth | evaluation-accumulates
# fix: .cpu() | host memory
import random
from collections import deque

import torch
from torch import nn

ENVS = 128
q_net = nn.Sequential(
    nn.Conv2d(4, 32, 8, 4),
    nn.ReLU(),
    nn.Conv2d(32, 64, 4, 2),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(3136, 512),
    nn.ReLU(),
    nn.Linear(512, 6),
).cuda()
optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-4)


class ReplayBuffer:
    def __init__(self, size):
        self.memory = deque(maxlen=size)

    def push(self, *transition):
        self.memory.append(transition)  # <- cause

    def sample(self, count):
        return zip(*random.sample(self.memory, count), strict=True)


def step_environments():
    return torch.rand(ENVS, 1, 84, 84), torch.rand(ENVS)


buffer = ReplayBuffer(1_000_000 // ENVS)
frames = torch.zeros(ENVS, 4, 84, 84, device="cuda")
for step in range(2_000):
    with torch.no_grad():
        actions = q_net(frames).argmax(1)
    frame, reward = step_environments()
    following = torch.cat([frames[:, 1:], frame.cuda()], 1)
    buffer.push(frames, actions, reward.cuda(), following)
    frames = following
    if step > 16 and step % 4 == 0:
        state, action, rewards, after = (torch.cat(part) for part in buffer.sample(2))
        with torch.no_grad():
            target = rewards + 0.99 * q_net(after).amax(1)
        value = q_net(state).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
