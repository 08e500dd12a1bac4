"""The Llama of llama.py under torch's own MemTracker, beside torch's counter: llama-compared.txt has memprof's peak."""

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tracker = MemTracker()
tracker.track_external(model, optimizer)


def step():
    tokens = torch.randint(0, 32_000, (4, 1024), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


torch.cuda.reset_peak_memory_stats()
with tracker:
    step()
    tracker.reset_mod_stats()
    step()
for device, peak in tracker.get_tracker_snapshot("peak").items():
    print("tracker", device, {str(kind): num_bytes for kind, num_bytes in peak.items()})
print("torch", torch.cuda.max_memory_allocated())
