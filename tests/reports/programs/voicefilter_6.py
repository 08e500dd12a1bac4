# maum-ai/voicefilter#6: the separation of a recording keeps gradients.
# resolved: torch.no_grad() in the inference
# run: --gpu-vram 3.5
# first: evaluation-with-gradients
# fix: no_grad
# also: fragmentation
# not: micro-batch
import argparse

import torch
from torch import nn


class VoiceFilter(nn.Module):
    def __init__(self, freq=601, dim=256):
        super().__init__()
        layers, channels = [], 1
        for kernel, dilation in [((1, 7), 1), ((7, 1), 1), ((5, 5), 1), ((5, 5), 2), ((5, 5), 4), ((5, 5), 8)]:
            pad = tuple((k - 1) * dilation // 2 for k in kernel)
            layers += [nn.Conv2d(channels, 64, kernel, padding=pad, dilation=dilation), nn.BatchNorm2d(64), nn.ReLU()]
            channels = 64
        self.conv = nn.Sequential(*layers, nn.Conv2d(64, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.lstm = nn.LSTM(8 * freq + dim, 400, batch_first=True, bidirectional=True)
        self.fc1, self.fc2 = nn.Linear(800, 600), nn.Linear(600, freq)

    def forward(self, x, dvec):
        x = self.conv(x.unsqueeze(1)).transpose(1, 2)
        x = x.reshape(x.size(0), x.size(1), -1)
        x = torch.cat([x, dvec.unsqueeze(1).repeat(1, x.size(1), 1)], dim=2)
        x = torch.relu(self.lstm(x)[0])
        return torch.sigmoid(self.fc2(torch.relu(self.fc1(x))))


def main(args):
    model = VoiceFilter().cuda()
    model.eval()
    dvec = torch.randn(256).cuda().unsqueeze(0)
    wav = torch.randn(args.seconds * 16000)
    mag = torch.stft(wav, 1200, 160, window=torch.hann_window(1200), return_complex=True).abs().T.cuda().unsqueeze(0)
    mask = model(mag, dvec)  # <- cause
    est = (mag * mask)[0].cpu().detach().numpy()
    print(est.shape)


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=int, default=20)
main(parser.parse_args())
