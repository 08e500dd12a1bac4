"""The two models of vits, in turn as its train.py steps them; the alignment is a diagonal."""

import json
import sys
from types import SimpleNamespace

import torch


def maximum_path(scores, mask):
    return torch.eye(*scores.shape[1:], device=scores.device).expand_as(scores) * mask


sys.modules["monotonic_align"] = SimpleNamespace(maximum_path=maximum_path)

import commons  # noqa: E402
from losses import discriminator_loss, feature_loss, generator_loss, kl_loss  # noqa: E402
from models import MultiPeriodDiscriminator, SynthesizerTrn  # noqa: E402

with open("configs/ljs_base.json") as file:
    sizes = json.load(file)["model"]
net_g = SynthesizerTrn(178, 513, 32, **sizes).cuda()
net_d = MultiPeriodDiscriminator(False).cuda()
optim_g = torch.optim.AdamW(net_g.parameters(), 2e-4)
optim_d = torch.optim.AdamW(net_d.parameters(), 2e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    x, x_lengths = torch.randint(0, 178, (4, 60)).cuda(), torch.full((4,), 60).cuda()
    spec, spec_lengths = torch.rand(4, 513, 200).cuda(), torch.full((4,), 200).cuda()
    y = torch.randn(4, 1, 200 * 256).cuda()
    with torch.amp.autocast("cuda"):
        y_hat, l_length, _, ids, _, z_mask, (_, z_p, m_p, logs_p, _, logs_q) = net_g(x, x_lengths, spec, spec_lengths)
        y = commons.slice_segments(y, ids * 256, 8192)
        real, made, _, _ = net_d(y, y_hat.detach())
        with torch.amp.autocast("cuda", enabled=False):
            loss_d, _, _ = discriminator_loss(real, made)
    optim_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.unscale_(optim_d)
    scaler.step(optim_d)
    with torch.amp.autocast("cuda"):
        _, made, features, features_made = net_d(y, y_hat)
        with torch.amp.autocast("cuda", enabled=False):
            loss_g, _ = generator_loss(made)
            loss_g = loss_g + feature_loss(features, features_made) + l_length.float().sum()
            loss_g = loss_g + kl_loss(z_p, logs_q, m_p, logs_p, z_mask)
    optim_g.zero_grad()
    scaler.scale(loss_g).backward()
    scaler.unscale_(optim_g)
    scaler.step(optim_g)
    scaler.update()
