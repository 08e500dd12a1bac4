"""A language model as a LightningModule, trained by Lightning's Trainer on a GPU, with validation and checkpoints."""

import argparse

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--precision", default="bf16-mixed")
parser.add_argument("--output", default="out-lightning")
args = parser.parse_args()


class LanguageModel(pl.LightningModule):
    def __init__(self, hidden, layers, vocab, length):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.zeros(length, hidden))
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        hidden = self.embedding(ids) + self.position[: ids.size(1)]
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))

    def _loss(self, batch):
        (ids,) = batch
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, index):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(count, shuffle=False):
    return DataLoader(TensorDataset(torch.randint(0, args.vocab, (count, args.length + 1))), args.batch, shuffle)


pl.seed_everything(1)
model = LanguageModel(args.hidden, args.layers, args.vocab, args.length)
checkpoints = ModelCheckpoint(dirpath=args.output, monitor="val_loss", save_top_k=1)
trainer = pl.Trainer(
    accelerator="gpu",
    devices=1,
    precision=args.precision,
    max_epochs=args.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    callbacks=[checkpoints, LearningRateMonitor("step")],
    logger=CSVLogger(args.output),
    default_root_dir=args.output,
)
trainer.fit(model, loader(args.rows, True), loader(args.rows // 2))
print("validated:", trainer.validate(model, loader(args.rows // 2), verbose=False))
print("best checkpoint:", bool(checkpoints.best_model_path), "loss", float(trainer.callback_metrics["val_loss"]))
