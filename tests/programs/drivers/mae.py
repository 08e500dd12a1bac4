"""vit-pytorch's masked autoencoder, as its README trains it."""

import torch
from vit_pytorch import MAE, ViT

encoder = ViT(image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=8, mlp_dim=2048)
model = MAE(encoder=encoder, masking_ratio=0.75, decoder_dim=512, decoder_depth=6).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(8, 3, 256, 256, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
