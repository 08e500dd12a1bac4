"""A small GPT trained on a file of tokens, with all that single-file training scripts usually have.

python char_gpt.py --n_layer=12 --n_embd=768 --batch_size=8
"""

import contextlib
import math
import os
import pickle
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# Configuration: every name can be overridden as --name=value.
out_dir = "out"
data_dir = "data"
eval_interval = 2
eval_iters = 2
init_from = "scratch"
gradient_accumulation_steps = 4
batch_size = 4
block_size = 64
vocab_size = 256
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.1
flash = True  # else attention is written out
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2
max_iters = 4
weight_decay = 0.1
grad_clip = 1.0
device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
compile = True
seed = 1337
names = [name for name, value in globals().items() if not name.startswith("_") and isinstance(value, (int, float, str))]
for argument in sys.argv[1:]:
    name, _, text = argument.removeprefix("--").partition("=")
    if name not in names:
        sys.exit(f"unknown setting: {name}")
    kind = type(globals()[name])
    globals()[name] = text == "True" if kind is bool else kind(text)
config = {name: globals()[name] for name in names}

os.makedirs(out_dir, exist_ok=True)
os.makedirs(data_dir, exist_ok=True)
torch.manual_seed(seed)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = contextlib.nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

for split, length in (("train", 20_000), ("val", 4_000)):
    path = os.path.join(data_dir, f"{split}.bin")
    if not os.path.exists(path):
        np.random.default_rng(seed).integers(0, vocab_size, length + block_size, dtype=np.uint16).tofile(path)
with open(os.path.join(data_dir, "meta.pkl"), "wb") as file:
    pickle.dump({"vocab_size": vocab_size}, file)


def get_batch(split):
    # Mapped again each time: a memmap that lives on keeps all pages it has touched.
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = [torch.from_numpy(data[start : start + block_size + 1].astype(np.int64)) for start in starts]
    batch = torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])
    if device_type == "cuda":
        return tuple(part.pin_memory().to(device, non_blocking=True) for part in batch)
    return tuple(part.to(device) for part in batch)


class LayerNorm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)
        if not flash:
            self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, n_head, width // n_head).transpose(1, 2) for part in self.qkv(x).split(width, 2)
        )
        if flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = LayerNorm(n_embd, False), LayerNorm(n_embd, False)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * n_embd, n_embd, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.norm = LayerNorm(n_embd, False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        position = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(position))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx if idx.size(1) <= block_size else idx[:, -block_size:])
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                kept, _ = logits.topk(min(top_k, logits.size(-1)))
                logits[logits < kept[:, [-1]]] = float("-inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


model = GPT()
print(f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
iter_num, best_val_loss = 0, 1e9
checkpoint = None
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device_type == "cuda")
if checkpoint is not None:
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None  # to free its memory
raw_model = model
if compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / max(1, max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


x, y = get_batch("train")
t0 = time.time()
while iter_num <= max_iters:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or iter_num == 0:
            best_val_loss = losses["val"]
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
                "config": config,
            }
            print(f"saving checkpoint to {out_dir}")
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
            del checkpoint
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    lossf = loss.item() * gradient_accumulation_steps
    if not math.isfinite(lossf):
        sys.exit(f"loss is {lossf}")
    print(f"iter {iter_num}: loss {lossf:.4f}, time {(t1 - t0) * 1000:.2f}ms, scale {scaler.get_scale()}")
    t0 = t1
    iter_num += 1

raw_model.eval()
with ctx:
    sampled = raw_model.generate(torch.zeros((1, 1), dtype=torch.long, device=device), 5, temperature=0.8, top_k=20)
print("sampled:", sampled[0].tolist())
print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
