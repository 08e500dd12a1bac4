"""llama3's own model on a card, with its cache: a prompt and some tokens."""

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
from llama.model import ModelArgs, Transformer

dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
initialize_model_parallel(1)
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("cuda")
model = Transformer(ModelArgs(dim=1024, n_layers=4, n_heads=16, n_kv_heads=4, vocab_size=32_000, max_batch_size=2, max_seq_len=512))
tokens = torch.randint(0, 32_000, (2, 64))
position = 0
for _ in range(16):
    logits = model.forward(tokens, position)
    position += tokens.shape[1]
    tokens = logits[:, -1].argmax(-1, keepdim=True)
