"""Deep Q-learning: a replay buffer on the host, a target network that is copied now and then."""

import copy
import random
from collections import deque

import torch
from torch import nn

online = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
memory: deque = deque(maxlen=1000)
state = torch.randn(8)
for step in range(200):
    if random.random() < 0.1:
        action = random.randrange(4)
    else:
        with torch.no_grad():
            action = int(online(state[None].cuda()).argmax(dim=1))
    following, reward, done = torch.randn(8), float(step % 5 == 0), step % 50 == 49
    memory.append((state, action, reward, following, done))
    state = following
    if len(memory) < 128:
        continue
    states, actions, rewards, next_states, dones = zip(*random.sample(memory, 64), strict=True)
    values = online(torch.stack(states).cuda()).gather(1, torch.tensor(actions).cuda()[:, None])[:, 0]
    with torch.no_grad():
        best = target(torch.stack(next_states).cuda()).max(1).values
        wanted = torch.tensor(rewards).cuda() + 0.99 * best * (1 - torch.tensor(dones).float().cuda())
    loss = nn.functional.smooth_l1_loss(values, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        target.load_state_dict(online.state_dict())
