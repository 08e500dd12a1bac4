# pytorch/functorch#774: the gradient of each sample at once, by vmap over grad, does not fit.
# resolved: vmap in chunks (chunk_size), which was added for it.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: chunk_size
import itertools

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 128, 256, 512, 512]
        self.body = nn.Sequential(
            *[
                part
                for before, after in itertools.pairwise(widths)
                for part in (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            ]
        )
        self.head = nn.Linear(512 * 7 * 7, 10)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


model = Net().eval().cuda()
parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of_one(parameters, image, label):
    scores = functional_call(model, parameters, (image.unsqueeze(0),))
    return F.cross_entropy(scores, label.unsqueeze(0))


images = torch.rand(192, 3, 224, 224, device="cuda")
labels = torch.randint(0, 10, (192,), device="cuda")
each = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(parameters, images, labels)  # <- cause
print({name: gradient.shape for name, gradient in each.items()})
