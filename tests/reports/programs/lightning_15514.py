# Lightning-AI/pytorch-lightning#15514: what a training step returns for the epoch's end piles up on the GPU.
# resolved: keep the loss alone; later releases removed the hook, and tell to fill and clear a list oneself.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: .cpu() | drop | clear
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2048, 2048)
        self.outputs = []

    def training_step(self, batch, batch_index):
        (x,) = batch
        restored = self.linear(x)
        loss = nn.functional.mse_loss(restored, x)
        self.outputs.append({"loss": loss.detach(), "x": restored.detach()})  # <- cause
        return loss

    def on_train_epoch_end(self):
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = DataLoader(TensorDataset(torch.randn(2048 * 40, 2048)), batch_size=2048)
trainer = pl.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Autoencoder(), data)
