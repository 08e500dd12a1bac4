# QwenLM/Qwen3-VL#1464: output_attentions=True returns the attentions of all layers, for 7000 tokens.
# resolved: open; the attentions of one layer, by a hook.
# run: --gpu a100-40gb
# first: does-not-fit | attention-scores
# fix: output_attentions=False
# also: attention-scores fragmentation float32-upcast
# not: micro-batch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=24,
    num_attention_heads=16,
    max_position_embeddings=8192,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config).half().cuda().eval()

maps = {}
for name, length in [("short", 512), ("video", 7000)]:
    input_ids = torch.randint(0, 32_000, (1, length), device="cuda")
    with torch.no_grad():
        outputs = model(input_ids=input_ids, output_attentions=True, use_cache=False)  # <- cause
    last = outputs.attentions[-1].mean(dim=1)
    maps[name] = last[0, -1].float().cpu()
    print(name, maps[name].shape)
