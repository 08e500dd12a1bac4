"""MAML-Pytorch's Meta on random tasks."""

from argparse import Namespace

import torch
from meta import Meta

told = Namespace(
    update_lr=0.4,
    meta_lr=1e-3,
    n_way=5,
    k_spt=1,
    k_qry=15,
    task_num=4,
    update_step=5,
    update_step_test=10,
    imgc=1,
    imgsz=28,
)
config = [
    ("conv2d", [64, 1, 3, 3, 2, 0]), ("relu", [True]), ("bn", [64]),
    ("conv2d", [64, 64, 3, 3, 2, 0]), ("relu", [True]), ("bn", [64]),
    ("conv2d", [64, 64, 3, 3, 2, 0]), ("relu", [True]), ("bn", [64]),
    ("conv2d", [64, 64, 2, 2, 1, 0]), ("relu", [True]), ("bn", [64]),
    ("flatten", []), ("linear", [5, 64]),
]  # fmt: skip
meta = Meta(told, config).to("cuda")
for _ in range(3):
    support, query = torch.randn(4, 5, 1, 28, 28), torch.randn(4, 75, 1, 28, 28)
    labels = torch.randint(0, 5, (4, 5)), torch.randint(0, 5, (4, 75))
    meta(support.cuda(), labels[0].cuda(), query.cuda(), labels[1].cuda())
