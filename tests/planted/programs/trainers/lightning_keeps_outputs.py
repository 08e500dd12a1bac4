# A module of Lightning that collects the outputs of its training steps in a list, and never empties it.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4096, 4096, bias=False)
        self.outputs = []

    def training_step(self, batch, index):
        out = self.net(batch.repeat(256, 1))
        self.outputs.append(out.detach())  # <- culprit
        return out.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = DataLoader(torch.zeros(60 * 16, 4096), batch_size=16)
trainer = pl.Trainer(
    max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(), data)
