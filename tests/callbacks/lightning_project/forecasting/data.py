"""Two sines, and their next values."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset, random_split


class Waves(LightningDataModule):
    def __init__(self, examples: int = 64, steps: int = 12, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        n, steps = self.hparams.examples, self.hparams.steps
        rates = torch.rand(n, 2, 1, generator=generator) + 0.1
        waves = torch.sin(rates * torch.arange(steps + 1)).mT
        pairs = TensorDataset(waves[:, :-1], waves[:, 1:])
        self.parts = random_split(pairs, [n // 2, n // 4, n // 4], generator)

    def _loader(self, part: int) -> DataLoader:
        return DataLoader(self.parts[part], batch_size=self.hparams.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(2)
