"""Two training steps of a model as large as Llama 3.1 8B: built on the host, moved to the GPU."""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--steps", type=int, default=2)
args = parser.parse_args()
config = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=args.layers,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ids = torch.randint(0, config.vocab_size, (args.batch, args.length), device="cuda")
for step in range(args.steps):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
