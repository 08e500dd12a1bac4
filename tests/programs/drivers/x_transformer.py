"""x-transformers, as its README trains a decoder and samples from it."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

model = TransformerWrapper(
    num_tokens=20_000,
    max_seq_len=1024,
    attn_layers=Decoder(dim=512, depth=6, heads=8, rotary_pos_emb=True, attn_flash=True, use_rmsnorm=True, ff_glu=True),
)
model = AutoregressiveWrapper(model).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(3):
    model.train()
    for _ in range(2):
        loss = model(torch.randint(0, 20_000, (4, 1025)).cuda())
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        model.eval()
        with torch.no_grad():
            model.generate(prompts=torch.zeros((1, 1), dtype=torch.long).cuda(), seq_len=16)
