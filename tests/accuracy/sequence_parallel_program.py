"""A small language model under memprof's sequence parallelism, really run by two processes (gloo, CPU).

Prints how far loss and gradients of the parts are from those of the whole, in float64, as JSON.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from memprof.workload.spread import _add_positions
from memprof.workload.ulysses import exchange_heads


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    ids = torch.randint(0, 96, (2, 32))
    whole = model(input_ids=ids, labels=ids)
    whole.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    batch = _add_positions({"input_ids": ids, "labels": ids})
    part = slice(rank * 32 // size, (rank + 1) * 32 // size)
    with exchange_heads(dist.group.WORLD):
        out = model(**{name: tensor[:, part].contiguous() for name, tensor in batch.items()})
        counted = (batch["shift_labels"][:, part] != -100).sum()
        share = out.loss * counted / (batch["shift_labels"] != -100).sum()  # the parts have means of their own
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        worst = max(worst, (parameter.grad - expected[name]).abs().max().item())
    logits = (out.logits - whole.logits[:, part]).abs().max().item()
    if rank == 0:
        print(json.dumps({"loss": abs(total.item() - whole.loss.item()), "gradients": worst, "logits": logits}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
