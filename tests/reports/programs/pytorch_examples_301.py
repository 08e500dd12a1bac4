# pytorch/examples#301: actions of all episodes stay in a list, and each backward goes through all of them.
# resolved: the list is emptied after each episode.
# run: --gpu-vram 1.2
# first: memory-growth
# also: fragmentation
# fix: empty it after each
from collections import namedtuple

import torch
from torch import nn
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Pong:
    def __init__(self, num_envs=16):
        self.num_envs = num_envs

    def reset(self):
        return torch.rand(self.num_envs, 4, 80, 80)

    def step(self, action):
        return torch.rand(self.num_envs, 4, 80, 80), torch.randn(self.num_envs)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 512),
            nn.ReLU(),
        )
        self.action_head, self.value_head = nn.Linear(512, 6), nn.Linear(512, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, state):
        x = self.body(state)
        return Categorical(logits=self.action_head(x)), self.value_head(x).squeeze(1)


policy = Policy().cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)


def select_action(state):
    dist, value = policy(state.cuda())
    action = dist.sample()
    policy.saved_actions.append(SavedAction(dist.log_prob(action), value))  # <- cause
    return action.cpu()


def finish_episode(gamma=0.99):
    returns, value = [], torch.zeros(16)
    for r in reversed(policy.rewards):
        value = r + gamma * value
        returns.insert(0, value)
    returns = torch.stack(returns).cuda()
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    losses = []
    for (log_prob, value), target in zip(policy.saved_actions, returns, strict=False):
        advantage = target - value.detach()
        losses.append((-log_prob * advantage).mean() + nn.functional.smooth_l1_loss(value, target))
    loss = torch.stack(losses).sum()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    return loss.item()


def main():
    env = Pong()
    for episode in range(100):
        state = env.reset()
        for _ in range(48):
            state, reward = env.step(select_action(state))
            policy.rewards.append(reward)
        loss = finish_episode()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-3e-4)
        print(episode, loss)


main()
