"""Speech recognition: packed sequences of changing lengths through an LSTM, a CTC loss."""

import torch
from torch import nn


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen = nn.LSTM(80, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(512, 32)

    def forward(self, sound, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(sound, lengths, batch_first=True, enforce_sorted=False)
        heard, _ = nn.utils.rnn.pad_packed_sequence(self.listen(packed)[0], batch_first=True)
        return self.letters(heard).log_softmax(-1)


model = Recognizer().cuda()
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
for step in range(3):
    lengths = torch.tensor([200 - 20 * step, 150, 120, 90])
    sound = torch.randn(4, int(lengths.max()), 80).cuda()
    text = torch.randint(1, 32, (4, 20)).cuda()
    probable = model(sound, lengths).transpose(0, 1)
    loss = criterion(probable, text, lengths.cuda(), torch.full((4,), 20).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
