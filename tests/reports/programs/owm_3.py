# beijixiong3510/OWM#3: a matrix that is updated in each step keeps the graphs of all updates.
# resolved: the update under torch.no_grad()
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: .detach() | no_grad
# also: memory-growth does-not-fit unattributed
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 128, 3, 2, 1)
        self.fc1, self.fc2 = nn.Linear(128 * 8 * 8, 2048), nn.Linear(2048, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)
        h = F.relu(self.fc1(x))
        return self.fc2(h), {"fc1": x.mean(0, keepdim=True), "fc2": h.mean(0, keepdim=True)}


class Appr:
    def __init__(self, model):
        self.model = model.cuda()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.P = {"fc1": torch.eye(8192, device="cuda"), "fc2": torch.eye(2048, device="cuda")}

    def project(self, inputs, alpha):
        for n, module in self.model.named_children():
            if n in self.P:
                r = inputs[n]
                k = self.P[n] @ r.t()
                self.P[n] = self.P[n] - k @ (r @ self.P[n]) / (alpha + r @ k)  # <- cause
                module.weight.grad = module.weight.grad @ self.P[n].detach()

    def train_epoch(self, batches):
        self.model.train()
        for i, (images, targets) in enumerate(batches):
            images, targets = images.cuda(), targets.cuda()
            output, inputs = self.model(images)
            loss = F.cross_entropy(output, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.project(inputs, alpha=0.001 ** (i / len(batches)))
            self.optimizer.step()
        return loss.item()


appr = Appr(Net())
batches = [(torch.rand(64, 3, 32, 32), torch.randint(0, 10, (64,))) for _ in range(40)]
for epoch in range(2):
    print(epoch, appr.train_epoch(batches))
