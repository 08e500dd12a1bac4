# A dict has the features of each step under the step's number, and nobody takes them out.
# fits: no
# exit: 3
# step: 24
# grows: 48
# run: --gpu-vram 2
# why: 1622 MiB less weights 128, batch and logits 96, gradients of logits, features and both weights 2 * 48 + 2 * 64,
#      and workspaces 17 leave 1157: 24 features of 48, or one less for what does not fit into blocks of the other
#      size.
import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Linear(width, width, bias=False)
        self.head = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def train(net, optimizer, steps, features_of):
    for step in range(steps):
        x = torch.randn(3072, 4096, device="cuda")
        features, logits = net(x)
        features_of[step] = features.detach()  # <- culprit
        loss = F.mse_loss(logits, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


net = Net(4096).cuda()
train(net, torch.optim.SGD(net.parameters(), lr=0.01), 80, {})
