# A sample is missing from the data.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: it raises when the sixth batch is made.
import torch
from torch.utils.data import DataLoader, Dataset

RECORDS = {index: torch.zeros(1024) for index in range(64) if index != 21}


class Records(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return RECORDS[index]  # <- culprit


net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(net.parameters())
for batch in DataLoader(Records(), batch_size=4):
    net(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
