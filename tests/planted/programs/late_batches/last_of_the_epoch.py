# A loader whose last sample is long, and is padded to.
# fits: no
# exit: 3
# step: 12
# run: --gpu-vram 2
# why: eleven batches have 4 rows of 64; the last has rows of 8192, whose attention scores alone are 4 * 8 * 8192^2 * 4
#      = 8 GiB.
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.ones(8192 if index == 47 else 64, dtype=torch.long)


class Attention(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.inner = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, ids):
        q, k, v = self.inner(self.embed(ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).mean()


def collate(texts):
    return pad_sequence(texts, batch_first=True)


model = Attention().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for ids in DataLoader(Texts(), batch_size=4, collate_fn=collate):
    optimizer.zero_grad()
    model(ids.cuda()).backward()
    optimizer.step()
