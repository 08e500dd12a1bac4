# huggingface/transformers#26304: twelve beams of each sample are one batch, with a KV cache for each.
# resolved: low_memory: beams one after another; fewer beams.
# run: --gpu rtx-4090
# first: does-not-fit
# fix: fewer beams
# also: fragmentation float32-upcast
# not: activation-checkpointing
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=16,
    num_attention_heads=16,
    eos_token_id=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).to(torch.float16).cuda().eval()
prompts = [torch.randint(3, 32_000, (16, 768)) for _ in range(2)]

summaries = []
for batch in prompts:
    with torch.no_grad():
        out = model.generate(  # <- cause
            batch.cuda(), num_beams=12, num_return_sequences=4, max_new_tokens=6, early_stopping=True
        )
    summaries.append(out[:, batch.shape[1] :].cpu())
print(len(summaries))
