# lightly-ai/lightly-train#944: masks of all queries are resized to the image before they are scored.
# resolved: resize and score them in chunks of queries.
# run: --gpu rtx-4090
# first: does-not-fit
# fix: in parts | in chunks
# not: activation-checkpointing
import torch
from torch import nn
from torch.nn import functional as F


class MaskModel(nn.Module):
    def __init__(self, queries=200, width=256):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 8, 1024, batch_first=True) for _ in range(3))
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.classes = nn.Linear(width, 81)

    def forward(self, image):
        x = self.patch(image)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.queries.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        queries, pixels = x[:, : len(self.queries)], x[:, len(self.queries) :]
        return (queries @ pixels.mT).unflatten(-1, (height, width)), self.classes(queries)


def get_masks_and_scores(mask_logits, class_logits, size):
    logits = F.interpolate(mask_logits, size, mode="bilinear")  # <- cause
    masks = logits > 0
    inside = (logits.sigmoid() * masks).flatten(2).sum(2) / masks.flatten(2).sum(2).clamp(min=1)  # <- cause
    scores, labels = class_logits.softmax(-1)[..., :-1].max(-1)
    return labels, masks, scores * inside


@torch.no_grad()
def validate(model, sizes):
    model.eval()
    for size in sizes:
        mask_logits, class_logits = model(torch.randn(1, 3, 640, 640, device="cuda"))
        labels, masks, scores = get_masks_and_scores(mask_logits, class_logits, size)
        print(masks.shape, scores.shape, labels.shape)


validate(MaskModel().cuda(), [(480, 640), (1080, 1920), (4000, 5000)])
