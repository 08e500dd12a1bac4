"""vit-pytorch, as its README trains a classifier."""

import sys

import torch
from torchvision.models import resnet50
from vit_pytorch import SimpleViT, ViT
from vit_pytorch.distill import DistillableViT, DistillWrapper

if sys.argv[1] == "distill":
    student = DistillableViT(
        image_size=256,
        patch_size=32,
        num_classes=1000,
        dim=1024,
        depth=6,
        heads=8,
        mlp_dim=2048,
        dropout=0.1,
        emb_dropout=0.1,
    )
    distiller = DistillWrapper(student=student, teacher=resnet50(), temperature=3, alpha=0.5, hard=False).cuda()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
    for _ in range(3):
        loss = distiller(torch.randn(8, 3, 256, 256).cuda(), torch.randint(0, 1000, (8,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
else:
    made = {"vit": ViT, "simple": SimpleViT}[sys.argv[1]]
    model = made(image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=16, mlp_dim=2048).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        predicted = model(torch.randn(16, 3, 256, 256, device="cuda"))
        loss = torch.nn.functional.cross_entropy(predicted, torch.randint(0, 1000, (16,), device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
