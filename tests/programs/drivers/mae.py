"""A masked autoencoder of mae, as its engine_pretrain.py trains it, with autocast and a scaler."""

import torch
from models_mae import MaskedAutoencoderViT

model = MaskedAutoencoderViT(img_size=112, embed_dim=384, depth=6, num_heads=6, decoder_embed_dim=256, decoder_depth=2)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    samples = torch.randn(32, 3, 112, 112).cuda(non_blocking=True)
    with torch.amp.autocast("cuda"):
        loss, _, _ = model(samples, mask_ratio=0.75)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
