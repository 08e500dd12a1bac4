# jmschrei/tangermeme#84: hooks are removed after an attribution, and what they have put on the modules is not.
# resolved: delete the attributes of the modules where the hooks are cleared.
# run: --gpu rtx-3060-12gb
# first: idle-memory
# fix: del | drop
# also: idle-memory
import torch
from torch import nn


def remember(module, args, output):
    module.input, module.output = args[0].detach(), output.detach()  # <- cause


def explain(model, x):
    handles = [part.register_forward_hook(remember) for part in model.modules() if isinstance(part, nn.ReLU)]
    x.requires_grad_()
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return x.grad.cpu()


def make(width=64):
    parts = [nn.Conv1d(4, width, 21, padding=10), nn.ReLU()]
    for _ in range(9):
        parts += [nn.Conv1d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv1d(width, 1, 75))


model = make().cuda().eval()
explain(model, torch.randn(128, 4, 2114, device="cuda"))
with torch.no_grad():
    for _ in range(6):
        print(model(torch.randn(2048, 4, 2114, device="cuda")).shape)
