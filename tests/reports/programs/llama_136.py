# meta-llama/llama#136: the KV caches of 32 sequences are made with the model of 7B, on 24 GB.
# resolved: a smaller max_batch_size.
# run: --gpu rtx-3090
# first: does-not-fit
# fix: reduce the first dimension (batch or length)
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class ModelArgs:
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    vocab_size: int = 32000
    hidden: int = 11008
    max_batch_size: int = 32
    max_seq_len: int = 2048


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads, self.head_dim = args.n_heads, args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))
        shape = (args.max_batch_size, args.max_seq_len, self.n_heads, self.head_dim)
        self.cache_k = torch.zeros(shape).cuda()  # <- cause
        self.cache_v = torch.zeros(shape).cuda()  # <- cause

    def forward(self, x, start):
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, self.n_heads, self.head_dim) for w in (self.wq, self.wk, self.wv))
        self.cache_k[:b, start : start + n] = k
        self.cache_v[:b, start : start + n] = v
        keys, values = self.cache_k[:b, : start + n], self.cache_v[:b, : start + n]
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, keys, values)), is_causal=n > 1)
        return self.wo(y.transpose(1, 2).reshape(b, n, -1))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.w1, self.w3 = (nn.Linear(args.dim, args.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)

    def forward(self, x, start):
        x = x + self.attention(self.attention_norm(x), start)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm, self.output = nn.RMSNorm(args.dim), nn.Linear(args.dim, args.vocab_size, bias=False)

    @torch.inference_mode()
    def forward(self, tokens, start):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, start)
        return self.output(self.norm(x[:, -1]))


def generate(model, prompts, max_gen_len=256):
    tokens, start = prompts, 0
    for _ in range(max_gen_len):
        logits = model(tokens[:, start:], start)
        start = tokens.size(1)
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens


def load(**kwargs):
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("cuda")
    return Transformer(ModelArgs(**kwargs)).eval()


if __name__ == "__main__":
    generator = load(max_seq_len=1024)
    print(generate(generator, torch.randint(0, 32000, (2, 32))).shape)
