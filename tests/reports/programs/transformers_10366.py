# huggingface/transformers#10366: a long recording is given to the model at once.
# resolved: the recording in chunks
# run: --gpu rtx-4090
# first: does-not-fit
# fix: in parts of at most
# not: amp-bfloat16
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

device = "cuda"
model = Wav2Vec2ForCTC(Wav2Vec2Config()).to(device).eval()
sr = 16000
recordings = [("intro.wav", 20), ("chapter1.wav", 40 * 60)]


@torch.no_grad()
def transcribe(name, seconds):
    wave = torch.randn(1, sr * seconds).to(device)
    logits = model(wave).logits  # <- cause
    ids = logits.argmax(-1)
    print(name, ids.shape)
    return ids.cpu()


texts = [transcribe(n, s) for n, s in recordings]
