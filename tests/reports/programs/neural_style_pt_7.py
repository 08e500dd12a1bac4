# ProGamerGov/neural-style-pt#7: L-BFGS keeps a hundred iterations of an image, and memory runs out in its only step.
# resolved: lbfgs_num_correction, which is history_size.
# run: --gpu-vram 0.95
# first: lbfgs-history
# also: fragmentation
# fix: history_size=
import torch
from torch import nn
from torch.nn import functional as F

CFG = [64, 64, "P", 128, 128, "P", 256, 256, 256, "P", 512]
params = {"size": 448, "num_iterations": 1000, "style_weight": 1e3, "content_weight": 5.0, "optimizer": "lbfgs"}


def vgg():
    layers, a = [], 3
    for b in CFG:
        if b == "P":
            layers.append(nn.AvgPool2d(2))
        else:
            layers += [nn.Conv2d(a, b, 3, 1, 1), nn.ReLU(inplace=True)]
            a = b
    return nn.Sequential(*layers).requires_grad_(False).cuda()


def gram(x):
    x = x.flatten(2)[0]
    return x @ x.T / x.numel()


class StyleLoss(nn.Module):
    def __init__(self, net, content, style):
        super().__init__()
        self.net = net
        with torch.no_grad():
            self.grams = [gram(f) for f in self.features(style)]
            self.content = self.features(content)[-1]

    def features(self, x):
        found = []
        for layer in self.net:
            x = layer(x)
            if isinstance(layer, nn.AvgPool2d):
                found.append(x)
        return found

    def forward(self, x):
        features = self.features(x)
        style = sum(F.mse_loss(gram(f), g) for f, g in zip(features, self.grams, strict=True))
        return params["style_weight"] * style + params["content_weight"] * F.mse_loss(features[-1], self.content)


def build(params):
    if params["optimizer"] == "lbfgs":
        return torch.optim.LBFGS(
            [params["image"]], max_iter=params["num_iterations"], tolerance_change=-1, tolerance_grad=-1
        )
    return torch.optim.Adam([params["image"]], lr=1.0)


def main():
    size = params["size"]
    loss_of = StyleLoss(vgg(), torch.rand(1, 3, size, size).cuda(), torch.rand(1, 3, size, size).cuda())
    params["image"] = nn.Parameter(torch.rand(1, 3, size, size, device="cuda"))
    optimizer = build(params)
    calls = [0]

    def feval():
        calls[0] += 1
        optimizer.zero_grad()
        loss = loss_of(params["image"])
        loss.backward()
        if calls[0] % 50 == 0:
            print("Iteration", calls[0], loss.item())
        return loss

    while calls[0] <= params["num_iterations"]:
        optimizer.step(feval)  # <- cause


main()
