# haitongli/knowledge-distillation-pytorch#25: a teacher in eval mode keeps what its forward made, for a backward.
# resolved: the teacher's forward under torch.no_grad()
# run: --gpu rtx-4080
# first: untrained-gradients | evaluation-with-gradients
# fix: torch.no_grad()
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def net(width, depth, classes=100):
    layers, c = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()], width
    for i in range(depth):
        layers += [nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()]
        if i % 4 == 3:
            layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


device = "cuda"
teacher = net(256, 24).to(device)
student = net(32, 8).to(device)
teacher.eval()
opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(256, 3, 96, 96), torch.randint(0, 100, (256,)))
loader = DataLoader(data, batch_size=128, shuffle=True)
T = 4.0
for epoch in range(3):
    student.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        t_logits = teacher(x)  # <- cause
        s_logits = student(x)
        kd = F.kl_div(F.log_softmax(s_logits / T, 1), F.softmax(t_logits / T, 1), reduction="batchmean") * T * T
        loss = 0.9 * kd + 0.1 * F.cross_entropy(s_logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
