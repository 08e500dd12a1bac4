# huggingface/transformers#24315: hidden states of a frozen encoder are collected with the graphs of their calls.
# resolved: torch.no_grad(), and the hidden states go to the CPU.
# run: --gpu rtx-3060-12gb
# first: evaluation-with-gradients | evaluation-accumulates | memory-growth
# fix: no_grad | .cpu()
# also: evaluation-accumulates evaluation-with-gradients
import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertModel

encoder = DistilBertModel(DistilBertConfig(n_layers=5)).cuda()


def collect_hidden_states(batches):
    encoder.eval()
    hidden_states_list, masks = [], []
    for ids, mask in batches:
        out = encoder(input_ids=ids.cuda(), attention_mask=mask.cuda())  # <- cause
        hidden_states_list.append(out.last_hidden_state)  # <- cause
        masks.append(mask)
    return torch.cat(hidden_states_list), torch.cat(masks)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
        self.out = nn.Linear(768, 4)

    def forward(self, hidden):
        return self.out(self.layer(hidden)[:, 0])


def make_batches():
    for _ in range(60):
        yield torch.randint(0, 30_000, (32, 256)), torch.ones(32, 256, dtype=torch.long)


hidden, masks = collect_hidden_states(make_batches())
head = Head().cuda()
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
for rows in torch.randperm(len(hidden)).split(32)[:4]:
    loss = head(hidden[rows.cuda()].detach()).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
