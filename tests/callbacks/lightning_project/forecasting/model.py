"""A forecaster: two recurrent layers and a head."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn


class Backbone(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, hidden_size, num_layers=2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)

    def forward(self, x):
        return self.decoder(self.encoder(x)[0])[0]


class Forecaster(LightningModule):
    def __init__(self, hidden_size: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Backbone(hidden_size)
        self.head = nn.Linear(hidden_size, 2)

    def forward(self, x):
        return self.head(self.net(x))

    def _loss(self, name, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log(f"{name}/loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._loss("train", batch)

    def validation_step(self, batch, batch_idx):
        self._loss("val", batch)

    def test_step(self, batch, batch_idx):
        self._loss("test", batch)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]
