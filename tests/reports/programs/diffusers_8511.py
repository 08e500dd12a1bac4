# huggingface/diffusers#8511: text encoders are deleted as a list, and variables still have them.
# resolved: del of each variable.
# run: --gpu rtx-3090
# first: idle-memory
# fix: delete the model
# also: fragmentation optimizer-step-temporaries
# not: micro-batch
import gc

import torch
from torch import nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel


class DiT(nn.Module):
    def __init__(self, dim=1536, depth=24):
        super().__init__()
        self.inp, self.context = nn.Linear(64, dim), nn.Linear(4096, dim)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, 24, 4 * dim, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.out = nn.Linear(dim, 64)

    def forward(self, latents, context):
        x = torch.cat([self.context(context), self.inp(latents)], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, context.shape[1] :])


def main():
    text_encoder_one = (  # <- cause
        CLIPTextModel(
            CLIPTextConfig(
                hidden_size=1280,
                intermediate_size=5120,
                num_hidden_layers=32,
                num_attention_heads=20,
            )
        )
        .half()
        .cuda()
    )
    text_encoder_two = (
        T5EncoderModel(
            T5Config(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
        )
        .half()
        .cuda()
    )
    text_encoder_one.requires_grad_(False)
    text_encoder_two.requires_grad_(False)
    text_encoders = [text_encoder_one, text_encoder_two]

    def compute_text_embeddings(text_encoders, ids):
        with torch.no_grad():
            pooled = text_encoders[0](ids[:, :77]).pooler_output
            return text_encoders[1](ids).last_hidden_state.float(), pooled.float()

    ids = torch.randint(0, 30_000, (1, 128), device="cuda")
    prompt_embeds, _pooled = compute_text_embeddings(text_encoders, ids)

    del text_encoders  # <- cause
    gc.collect()
    torch.cuda.empty_cache()

    transformer = DiT().cuda()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
    for step in range(3):
        latents = torch.randn(2, 1024, 64, device="cuda")
        noise = torch.randn_like(latents)
        pred = transformer(latents + noise, prompt_embeds.expand(2, -1, -1))
        loss = F.mse_loss(pred, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


main()
