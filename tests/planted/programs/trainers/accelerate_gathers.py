# A loop with accelerate gathers the outputs of all batches for its metrics.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = torch.nn.Linear(4096, 4096, bias=False)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.zeros(60 * 16, 4096), batch_size=16)
)
gathered = []
for batch in loader:
    out = model(batch.repeat(256, 1))
    accelerator.backward(out.square().mean())
    optimizer.step()
    optimizer.zero_grad()
    gathered.append(accelerator.gather_for_metrics(out.detach()))  # <- culprit
