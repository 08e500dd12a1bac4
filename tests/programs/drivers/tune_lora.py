"""torchtune's LoRA of a small Llama, as its lora_finetune_single_device.py trains it: chunked logits, checkpoints."""

import torch
from torchtune import modules, training
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

with training.set_default_dtype(torch.bfloat16), torch.device("cuda"):
    model = lora_llama3_2(
        ["q_proj", "v_proj"], apply_lora_to_mlp=True, vocab_size=32_000, num_layers=4, num_heads=8, num_kv_heads=2,
        embed_dim=512, max_seq_len=1024, intermediate_dim=2048, lora_rank=8, lora_alpha=16,
    )  # fmt: skip
set_trainable_params(model, get_adapter_params(model))
training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
loss_fn = LinearCrossEntropyLoss(num_output_chunks=8)
loss_fn.set_model_output(model)
optimizer = torch.optim.AdamW(get_adapter_params(model).values(), lr=3e-4, fused=True)
for _ in range(3):
    tokens = torch.randint(0, 32_000, (2, 513)).cuda()
    loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
