# flairNLP/flair#1638: rows of a table are set to embeddings, each with its graph.
# resolved: fine_tune=False, for no gradients; and the table in host memory.
# run: --gpu-vram 4
# first: evaluation-with-gradients
# fix: no_grad
# also: evaluation-accumulates fragmentation
# not: micro-batch activation-checkpointing
import torch
from torch import nn
from transformers import BertConfig, BertModel


class DocumentEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig())

    def forward(self, ids):
        return self.bert(input_ids=ids).last_hidden_state


embeddings = DocumentEmbeddings().cuda()
texts = [torch.randint(0, 30_000, (1, 300)) for _ in range(80)]

X = torch.empty(size=(len(texts), 768)).cuda()
for i, text in enumerate(texts):
    sentence = text.cuda()
    X[i] = embeddings(sentence).mean(1).squeeze(0)  # <- cause
print(X.shape)
