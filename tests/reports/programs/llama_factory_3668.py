# hiyouga/LlamaFactory#3668: a batch with one very long text comes late in the epoch.
# resolved: a cutoff for the length of texts.
# run: --gpu t4
# first: larger-batch
# fix: truncate
# also: logits-explosion unused-kv-cache fragmentation
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

random.seed(3)
lengths = [int(random.lognormvariate(5.2, 0.25)) for _ in range(96)]
lengths[77] = 1900
texts_all = [torch.randint(0, 50_257, (n,)) for n in lengths]


def collate(texts):
    return pad_sequence(texts, batch_first=True)


model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_positions=2048)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for start in range(0, len(texts_all), 8):
    ids = collate(texts_all[start : start + 8])
    out = model(input_ids=ids.cuda(), labels=ids.cuda())  # <- cause
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    print(start, out.loss.item())
