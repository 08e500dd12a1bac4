# Adam by hand, whose state is made in the first step.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: four layers of 64 MiB with gradients and two moments are 1024, temporaries of one layer 3 * 64.
import torch
from torch import nn


class Adam:
    def __init__(self, parameters, rate=1e-3):
        self.parameters = list(parameters)
        self.rate = rate
        self.state = {}

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            if parameter not in self.state:
                self.state[parameter] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            first, second = self.state[parameter]
            first.lerp_(parameter.grad, 0.1)
            second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-self.rate)
            parameter.grad = None


net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
adam = Adam(net.parameters())
for _ in range(12):
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    adam.step()
