"""A pipeline of four stages, started by torchrun: only the first knows the tokens, and only the last the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, LAYERS, TOKENS, VOCABULARY = 2048, 6, 1024, 32_000

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

layers = [nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True) for _ in range(LAYERS)]
first = [nn.Embedding(VOCABULARY, WIDTH)] if rank == 0 else []
last = [nn.Linear(WIDTH, VOCABULARY)] if rank == size - 1 else []
stage = PipelineStage(nn.Sequential(*first, *layers, *last).cuda(), rank, size, torch.device("cuda"))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
optimizer = torch.optim.AdamW(stage.submod.parameters())

for _ in range(2):
    tokens = torch.randint(VOCABULARY, (8, TOKENS), device="cuda")
    schedule.step(*([tokens] if rank == 0 else []), **({"target": tokens} if rank == size - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
