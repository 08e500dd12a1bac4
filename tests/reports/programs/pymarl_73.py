# oxwhirl/pymarl#73: actions are put into a buffer of 5000 episodes with the graphs of their runs.
# resolved: actions are detached, or arrays, before they are put there
# run: --gpu-vram 4
# first: memory-growth
# fix: .detach()
import random
from collections import deque

import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self, obs=128, hidden=512, actions=16):
        super().__init__()
        self.fc1, self.rnn, self.fc2 = nn.Linear(obs, hidden), nn.GRUCell(hidden, hidden), nn.Linear(hidden, actions)

    def forward(self, obs, h):
        h = self.rnn(torch.relu(self.fc1(obs)), h)
        return self.fc2(h), h


class EpisodeRunner:
    def __init__(self, agent, envs=64, limit=30):
        self.agent, self.envs, self.limit = agent, envs, limit

    def run(self):
        h = torch.zeros(self.envs, 512, device="cuda")
        episode = {"obs": [], "actions": [], "reward": []}
        for t in range(self.limit):
            obs = torch.randn(self.envs, 128, device="cuda")
            q, h = self.agent(obs, h)
            actions = torch.softmax(q, dim=-1)
            episode["obs"].append(obs)
            episode["actions"].append(actions)  # <- cause
            episode["reward"].append(torch.rand(self.envs, device="cuda"))
        return {key: torch.stack(value) for key, value in episode.items()}


agent = Agent().cuda()
optimizer = torch.optim.RMSprop(agent.parameters(), lr=5e-4)
runner, buffer = EpisodeRunner(agent), deque(maxlen=5000)
for episode in range(400):
    buffer.append(runner.run())  # <- cause
    if len(buffer) >= 4:
        batch = random.sample(buffer, 4)
        obs = torch.cat([b["obs"] for b in batch], 1)
        actions = torch.cat([b["actions"] for b in batch], 1).detach()
        reward = torch.cat([b["reward"] for b in batch], 1)
        h, loss = torch.zeros(obs.shape[1], 512, device="cuda"), 0
        for t in range(len(obs)):
            q, h = agent(obs[t], h)
            loss = loss + ((q * actions[t]).sum(-1) - reward[t]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
