# hiyouga/LlamaFactory#10720: log-probabilities of all words are made for one of them, of sliced logits.
# resolved: logits are gathered, and their logsumexp is taken away, in chunks
# run: --gpu-vram 32
# first: logits-explosion | does-not-fit
# fix: logsumexp
# also: fragmentation logits-explosion float32-upcast
import copy

import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM


def get_batch_logps(logits, labels, pad=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != pad
    labels[labels == pad] = 0
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)  # <- cause
    return (per_token * mask).sum(-1)


class DPO:
    def __init__(self, model, beta=0.1):
        self.model, self.ref_model, self.beta = model.cuda(), copy.deepcopy(model).cuda().eval(), beta
        self.ref_model.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-7)

    def concatenated_forward(self, model, batch):
        all_logits = model(input_ids=batch["input_ids"], use_cache=False).logits.to(torch.float32)
        all_logps = get_batch_logps(all_logits, batch["labels"])
        return all_logps.chunk(2)

    def step(self, batch):
        chosen, rejected = self.concatenated_forward(self.model, batch)
        with torch.no_grad():
            ref_chosen, ref_rejected = self.concatenated_forward(self.ref_model, batch)
        loss = -F.logsigmoid(self.beta * ((chosen - rejected) - (ref_chosen - ref_rejected))).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


config = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
model = Qwen2ForCausalLM(config).to(torch.bfloat16)
model.gradient_checkpointing_enable()
model.train()
trainer = DPO(model)
for step in range(5):
    ids = torch.randint(0, 151936, (8, 1536), device="cuda")
    labels = ids.clone()
    labels[:, :300] = -100
    print(step, trainer.step({"input_ids": ids, "labels": labels}))
