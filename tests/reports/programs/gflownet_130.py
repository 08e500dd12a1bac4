# recursionpharma/gflownet#130: trajectories in a replay buffer are on the GPU, with the graphs of their scores.
# resolved: detach and move to the CPU whatever is pushed into the buffer.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: .cpu()
import random
from collections import deque

import torch
from torch import nn


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def push(self, *transition):
        self.buffer.append(transition)  # <- cause

    def sample(self, count):
        return random.sample(list(self.buffer), min(count, len(self.buffer)))


policy = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 64)).cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
replay = ReplayBuffer(10000)
for _ in range(100000):
    states = torch.randn(1024, 512, device="cuda")
    logits = policy(states)
    chances = logits.log_softmax(-1)
    reward = torch.rand(1024, device="cuda")
    replay.push(states, chances, reward)
    batch = [(state, gain) for state, _, gain in replay.sample(4)]
    loss = sum((policy(state).logsumexp(-1) - gain).square().mean() for state, gain in batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
