# jacobgil/pytorch-grad-cam#132: each object of a loop registers its hooks on the model, where they stay.
# resolved: the hooks are removed when the object has done its work.
# run: --gpu-vram 6
# first: memory-growth
# fix: handle.remove()
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class GradCAM:
    def __init__(self, model, layer):
        self.model, self.layer = model, layer
        self.activations, self.gradients = [], []
        self.layer.register_forward_hook(self.save_activation)  # <- cause
        self.layer.register_full_backward_hook(self.save_gradient)

    def save_activation(self, module, inputs, output):
        self.activations.append(output)

    def save_gradient(self, module, grad_input, grad_output):
        self.gradients.append(grad_output[0])

    def __call__(self, images, category):
        self.activations, self.gradients = [], []
        scores = self.model(images)
        self.model.zero_grad()
        scores[:, category].sum().backward()
        weights = self.gradients[-1].mean(dim=(2, 3), keepdim=True)
        cam = F.relu((weights * self.activations[-1]).sum(1))
        return (cam / cam.amax()).detach().cpu()


def block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


model = (
    nn.Sequential(
        block(3, 64, 2),
        block(64, 128, 2),
        block(128, 256, 1),
        block(256, 256, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 1000),
    )
    .cuda()
    .eval()
)

maps = []
for i in range(60):
    images = torch.rand(16, 3, 224, 224).cuda()
    cam = GradCAM(model=model, layer=model[3])
    maps.append(cam(images, category=i))
    del cam
print(len(maps))
