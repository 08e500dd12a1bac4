"""Trains a model of the size of Qwen3-4B on texts of 131,072 tokens, on as many GPUs as torchrun starts processes.

torchrun --nproc-per-node 2 long_context.py             # each GPU has a text of its own
torchrun --nproc-per-node 2 long_context.py --split     # all GPUs have a part of one text
"""

import argparse
import os

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

TOKENS = 131_072
CHUNK = 1_024
"""Tokens whose logits are there at a time."""


class Exchange(torch.autograd.Function):
    """[batch, heads, tokens, size]: from all heads of some tokens to some heads of all tokens, or back."""

    @staticmethod
    def forward(context, x, split, joined):
        """Cut dimension `split` into a piece for each GPU, and put those that come together along `joined`."""
        context.dimensions = split, joined
        pieces = torch.stack(x.chunk(dist.get_world_size(), split))
        found = torch.empty_like(pieces)
        dist.all_to_all_single(found, pieces)
        return torch.cat(list(found), joined)

    @staticmethod
    def backward(context, gradient):
        """The other way round."""
        split, joined = context.dimensions
        return Exchange.apply(gradient, joined, split), None, None


def attend(module, query, key, value, attention_mask, scaling, **others):
    """Attention over all tokens of a text of which each GPU has a part (as in DeepSpeed-Ulysses)."""
    query, key, value = (Exchange.apply(x, 1, 2) for x in (query, key, value))
    found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return Exchange.apply(found, 2, 1).transpose(1, 2), None


class Trained(nn.Module):
    """A causal language model and its loss, which is computed in chunks and again in the backward."""

    def __init__(self, attention, num_layers):
        super().__init__()
        config = transformers.Qwen3Config(
            hidden_size=2560, intermediate_size=9728, num_hidden_layers=num_layers, num_key_value_heads=8,
            tie_word_embeddings=True, max_position_embeddings=TOKENS, use_cache=False,
        )  # fmt: skip
        self.model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
        layers = self.model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)

    def forward(self, tokens, labels, positions):
        """The mean loss of these tokens."""
        hidden = self.model.model(tokens, position_ids=positions).last_hidden_state[0]
        losses = [
            checkpoint(self.loss, some, wanted, use_reentrant=False)
            for some, wanted in zip(hidden.split(CHUNK), labels[0].split(CHUNK), strict=True)
        ]
        return sum(losses) / labels.numel()

    def loss(self, hidden, labels):
        """The sum over a chunk."""
        return functional.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


def main():
    """Train for three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--split", action="store_true", help="spread each text over all GPUs")
    parser.add_argument("--layers", type=int, default=36)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, gpus = dist.get_rank(), dist.get_world_size()
    AttentionInterface.register("spread", attend)
    with torch.device("meta"):
        trained = Trained("spread" if options.split else "sdpa", options.layers)
    for layer in trained.model.model.layers:
        fully_shard(layer)
    fully_shard(trained)
    trained.to_empty(device="cuda")
    trained.train()
    optimizer = torch.optim.AdamW(trained.parameters())
    part = slice(rank * TOKENS // gpus, (rank + 1) * TOKENS // gpus) if options.split else slice(0, TOKENS)
    for step in range(3):
        text = torch.randint(0, 151_936, (1, TOKENS + 1))
        tokens, labels = text[:, :-1][:, part].cuda(), text[:, 1:][:, part].cuda()
        loss = trained(tokens, labels, torch.arange(TOKENS)[None, part].cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
