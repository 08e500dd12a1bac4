# deepgram/kur#14: batches are sorted by their lengths, and the long ones of the epoch's end do not fit.
# resolved: a smaller batch, or a limit of the length.
# run: --gpu-vram 8
# first: larger-batch
# fix: length
# also: fragmentation
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)


class DeepSpeech(nn.Module):
    def __init__(self, hidden=800, layers=5, labels=29):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, True),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, True),
        )
        self.rnn = nn.GRU(32 * 41, hidden, layers, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, labels)

    def forward(self, x):
        x = self.conv(x[:, None])
        x = x.flatten(1, 2).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.fc(x).log_softmax(-1)


seconds = torch.empty(1600).log_normal_(1.9, 0.55).clamp(1, 35).sort().values
utterances = [torch.randn(int(s * 100), 161) for s in seconds]

model = DeepSpeech().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9, nesterov=True)
criterion = nn.CTCLoss(zero_infinity=True)
for start in range(0, len(utterances), 32):
    chunk = utterances[start : start + 32]
    batch = pad_sequence(chunk, batch_first=True).transpose(1, 2)
    target_lengths = torch.tensor([max(1, len(u) // 8) for u in chunk])
    targets = torch.randint(1, 29, (len(chunk), int(target_lengths.max())))
    log_probs = model(batch.cuda())  # <- cause
    out_lengths = torch.tensor([(len(u) + 1) // 2 for u in chunk]).clamp(max=log_probs.size(1))
    loss = criterion(log_probs.transpose(0, 1), targets, out_lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 400)
    optimizer.step()
    print(start, loss.item())
