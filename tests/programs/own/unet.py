"""Segmentation with a U-Net, a dice loss, an average of the weights for evaluation."""

import torch
from torch import nn


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 32), block(32, 64), block(64, 128)
        self.up2, self.up1 = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.mix2, self.mix1, self.out = block(128, 64), block(64, 32), nn.Conv2d(32, 2, 1)

    def forward(self, image):
        first = self.down1(image)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        middle = self.middle(nn.functional.max_pool2d(second, 2))
        up = self.mix2(torch.cat([self.up2(middle), second], 1))
        return self.out(self.mix1(torch.cat([self.up1(up), first], 1)))


model = UNet().to("cuda")
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    image, mask = torch.randn(4, 3, 128, 128).to("cuda"), torch.randint(0, 2, (4, 128, 128)).to("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(image)
        share = logits.softmax(1)[:, 1]
        dice = 1 - 2 * (share * mask).sum() / (share.sum() + mask.sum())
        loss = nn.functional.cross_entropy(logits, mask) + dice
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    averaged.update_parameters(model)
model.eval()
with torch.inference_mode():
    hits = (averaged.module.eval()(torch.randn(2, 3, 128, 128, device="cuda")).argmax(1) == 1).sum().item()
