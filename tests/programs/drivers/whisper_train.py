"""Fine-tunes a whisper made from its dimensions, with teacher forcing."""

import torch
from whisper.model import ModelDimensions, Whisper

model = Whisper(ModelDimensions(80, 1500, 384, 6, 4, 51865, 448, 384, 6, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    mel = torch.randn(4, 80, 3000, device="cuda")
    tokens = torch.randint(0, 51865, (4, 65), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(mel, tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
