"""Text generation: transformers' generate() in several ways, and a loop of one's own over a key-value cache."""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--prompt", type=int, default=10)
parser.add_argument("--new", type=int, default=6)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--way", default="greedy", choices=("greedy", "sample", "beam", "static", "loop"))
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--dtype", default="bfloat16")
args = parser.parse_args()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = LlamaConfig(
    vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max(64, args.prompt + args.new),
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype), attn_implementation=args.attn)
model = model.to(device).eval()
ids = torch.randint(3, args.vocab, (args.batch, args.prompt), device=device)
mask = torch.ones_like(ids)
mask[0, :2] = 0  # left padding

begin = time.perf_counter()
if args.way == "loop":
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        tokens = [output.logits[:, -1].argmax(-1, keepdim=True)]
        done = torch.zeros(args.batch, dtype=torch.bool, device=device)
        while len(tokens) < args.new:
            mask = torch.cat([mask, mask.new_ones(args.batch, 1)], dim=1)
            output = model(tokens[-1], attention_mask=mask, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1].float() / 0.7
            sorted_logits, order = logits.sort(descending=True)
            keep = sorted_logits.softmax(-1).cumsum(-1) < 0.9
            keep[:, 0] = True
            probabilities = torch.zeros_like(logits).scatter_(1, order, sorted_logits.softmax(-1) * keep)
            tokens.append(torch.multinomial(probabilities, 1))
            done |= tokens[-1].squeeze(1) == config.eos_token_id
            if done.all():
                break
    result = torch.cat([ids, *tokens], dim=1)
    print("cache holds", cache.get_seq_length(), "positions")
else:
    options = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
        "beam": {"do_sample": False, "num_beams": 3, "length_penalty": 0.8, "early_stopping": True},
        "static": {
            "do_sample": False,
            "past_key_values": StaticCache(config=config, max_cache_len=args.prompt + args.new),
        },
    }[args.way]
    result = model.generate(ids, attention_mask=mask, max_new_tokens=args.new, **options)
if device.type == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - begin
print("shape:", tuple(result.shape), "first:", result[0].cpu().numpy().tolist()[:3])
print(f"{result.shape[1] / seconds:.1f} tokens/s, peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
