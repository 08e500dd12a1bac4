"""Policy gradients: a rollout in preallocated buffers on the GPU, several epochs of shuffled parts of it."""

import torch
from torch import nn
from torch.distributions import Categorical

actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4, eps=1e-5)
seen, taken = torch.zeros(64, 4, 8, device="cuda"), torch.zeros(64, 4, dtype=torch.long, device="cuda")
chances, values, rewards = (torch.zeros(64, 4, device="cuda") for _ in range(3))
state = torch.zeros(4, 8, device="cuda")
for _ in range(2):
    for step in range(64):
        with torch.no_grad():
            policy = Categorical(logits=actor(state))
            action = policy.sample()
            seen[step], taken[step], chances[step], values[step] = (
                state,
                action,
                policy.log_prob(action),
                critic(state)[:, 0],
            )
        action.cpu().numpy()
        rewards[step] = torch.ones(4).cuda()
        state = torch.randn(4, 8).cuda()
    with torch.no_grad():
        gained, last = torch.zeros_like(rewards), torch.zeros(4, device="cuda")
        for step in reversed(range(64)):
            following = values[step + 1] if step < 63 else critic(state)[:, 0]
            last = rewards[step] + 0.99 * following - values[step] + 0.95 * 0.99 * last
            gained[step] = last
    flat = [each.reshape(256, *each.shape[2:]) for each in (seen, taken, chances, gained, values)]
    for _ in range(2):
        for rows in torch.randperm(256).split(64):
            states, actions, before, gain, value = (each[rows.cuda()] for each in flat)
            policy = Categorical(logits=actor(states))
            ratio = (policy.log_prob(actions) - before).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * policy.entropy().mean()
            loss = loss + 0.5 * nn.functional.mse_loss(critic(states)[:, 0], gain + value)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()
