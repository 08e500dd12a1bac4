"""Prints the tables of docs/attention.md: what one attention layer takes, by kind of attention and number of tokens.

Its projections, norms and attention, as in Qwen3-4B (32 heads of 128, 8 of keys and values, bfloat16), on a virtual
GPU; without parameters and their gradients, and without the layer's input.

python docs/attention_table.py
"""

from __future__ import annotations

import math

import torch
import transformers
from transformers.masking_utils import create_causal_mask

import memprof
from memprof.spec import OWN_ATTENTIONS
from memprof.units import GIB
from memprof.workload import attention

TOKENS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
KINDS = ("eager", "sdpa", "flex_attention", "sliding", "block-sparse", "linear", "nsa", "nsa-eager")
GEOMETRY = {
    "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 64,
    "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": max(TOKENS), "use_cache": False,
}  # fmt: skip


def taken(kind: str, tokens: int) -> tuple[int, int]:
    """Bytes at the most in a forward and backward, and those kept from one to the other."""
    if kind in OWN_ATTENTIONS:
        attention.register(kind)
    config = transformers.Qwen3Config(**GEOMETRY, attn_implementation=kind)
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = transformers.Qwen3ForCausalLM(config)
        if kind in OWN_ATTENTIONS:
            attention.adapt(model, kind)
        layer = model.to("cuda", torch.bfloat16).model.layers[0].self_attn
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        hidden = torch.zeros(1, tokens, 2560, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        places = torch.arange(tokens, device="cuda")[None]
        turned = model.model.rotary_emb(hidden, places)
        layer.q_proj(hidden[:, :1]).sum().backward()  # cuBLAS takes its workspace
        before = gpu.allocated_bytes
        mask = create_causal_mask(
            config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=places
        )
        output, _ = layer(hidden, position_embeddings=turned, attention_mask=mask)
        kept = gpu.allocated_bytes - before
        output.backward(torch.zeros_like(output))
    return gpu.report().peak.allocated_bytes - before, kept


def table(title: str, rows: dict[str, list[int]]) -> None:
    """Print one, in GiB, with the exponent of the last doubling."""
    print(f"{title:<15}" + "".join(f"{tokens:>11,}" for tokens in TOKENS) + "  exponent")
    for kind, sizes in rows.items():
        exponent = math.log2(sizes[-1] / sizes[-2])
        print(f"{kind:<15}" + "".join(f"{size / GIB:>11,.2f}" for size in sizes) + f"{exponent:>10.2f}")


def main() -> None:
    """Print both."""
    found = {kind: [taken(kind, tokens) for tokens in TOKENS] for kind in KINDS}
    table("most, GiB", {kind: [most for most, _ in each] for kind, each in found.items()})
    print()
    table("kept, GiB", {kind: [kept for _, kept in each] for kind, each in found.items()})


if __name__ == "__main__":
    main()
