# generative-computing/mellea#544: each answer of a session keeps the whole output of generate(), its KV cache too.
# resolved: keep the text; drop past_key_values and scores of the output.
# run: --gpu rtx-3060-12gb
# first: evaluation-accumulates | memory-growth
# fix: drop | .cpu()
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Session:
    def __init__(self, model):
        self.model, self.history = model, []

    def instruct(self, prompt):
        output = self.model.generate(
            prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        self.history.append({"tokens": output.sequences[0].tolist(), "raw": output})  # <- cause
        return self.history[-1]["tokens"]


config = LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=32000
)
session = Session(LlamaForCausalLM(config).cuda().eval())
for _ in range(24):
    session.instruct(torch.randint(0, 32000, (1, 1024), device="cuda"))
