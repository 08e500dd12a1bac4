# Texts are embedded by a language model, which keeps keys and values for a generation that does not come.
# fits: yes
# exit: 0
# run: --gpu-vram 8
# why: 16 layers x 32,768 tokens x (1,024 keys and 1,024 values) of two bytes are 2 GiB, of which a layer uses 128 MiB.
import torch
from transformers import LlamaConfig, LlamaModel

sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16}
model = LlamaModel(LlamaConfig(vocab_size=8000, **sizes)).half().cuda().eval()
embeddings = []
with torch.no_grad():
    for _ in range(4):
        ids = torch.randint(0, 8000, (16, 2048)).cuda()
        out = model(ids)  # <- culprit
        embeddings.append(out.last_hidden_state[:, -1].cpu())
        del out
print(torch.cat(embeddings).shape)
