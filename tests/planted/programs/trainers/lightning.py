# A module of Lightning, trained for two epochs with a validation after each.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights, gradients and momentum of 16 MiB, batches of 64 rows.
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2048, 2048)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("score", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


data = DataLoader(torch.zeros(8 * 64, 2048), batch_size=64)
trainer = pl.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(), data, data)
