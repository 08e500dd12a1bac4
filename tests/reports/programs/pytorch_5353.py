# pytorch/pytorch#5353: the graphs of all 1400 moves of an episode wait for one backward.
# resolved: fewer moves before a backward.
# run: --gpu-vram 5
# first: memory-growth
# fix: fewer calls
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F


class Policy(nn.Module):
    def __init__(self, actions=3):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2)
        self.affine1, self.affine2 = nn.Linear(64 * 8 * 8, 512), nn.Linear(512, actions)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.affine1(x.flatten(1)))
        return F.softmax(self.affine2(x), dim=1)


class Pong:
    def __init__(self, games):
        self.games = games

    def reset(self):
        return torch.rand(self.games, 2, 80, 80)

    def step(self, action):
        return torch.rand(self.games, 2, 80, 80), torch.randn(self.games)


def select_action(policy, state):
    probs = policy(state.cuda())  # <- cause
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action


def finish_episode(policy, optimizer, gamma=0.99):
    total, returns = 0, []
    for r in reversed(policy.rewards):
        total = r + gamma * total
        returns.insert(0, total)
    returns = torch.stack(returns).cuda()
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = torch.stack([-lp * r for lp, r in zip(policy.saved_log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]


env = Pong(games=32)
policy = Policy().cuda()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-4)
for episode in range(20):
    state = env.reset()
    for t in range(1400):
        action = select_action(policy, state)
        state, reward = env.step(action)
        policy.rewards.append(reward)
    finish_episode(policy, optimizer)
    print("episode", episode)
