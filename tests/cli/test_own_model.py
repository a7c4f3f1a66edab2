"""A model of one's own: its file and its configuration, and every command takes it."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import QUIET, run

#: All that an outsider writes.
MODEL = '''
"""Reads the rows of an image one after the other."""
import torch
from torch.nn import functional as F
from ln_zoo import GRU, LayerNorm, Linear, Norm
from ln_zoo.models import DynamicsTask, ZooModule
from ln_zoo.norms import from_config


class RowReader(ZooModule):
    """A layer-normalised GRU over rows.

    Args:
        hidden_size: H.
        norm: default `LayerNorm`.
        lr: Adam's.
    """

    pipeline_tag = "image-classification"

    def __init__(self, hidden_size: int = 8, norm: Norm | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        self.remember(norm)
        self.lr = lr
        self.rows = GRU(8, hidden_size, batch_first=True, norm=norm)
        self.readout = Linear(hidden_size, 10)

    @classmethod
    def card_example(cls, preprocessing):
        return "print(model(torch.rand(1, 8, 8)).argmax(-1))"

    def forward(self, images):
        return self.readout(self.rows(images.reshape(-1, 8, 8))[0][:, -1])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_nll", self.training_step(batch, batch_idx), batch_size=len(batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_nll", self.training_step(batch, batch_idx), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def dynamics_data(self, examples):
        return "Digits", {"eval_batch_size": examples}

    def dynamics_task(self, data, examples, steps):
        images, labels = next(iter(data.test_dataloader()))

        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        return DynamicsTask((images.double(), labels), loss, f"{len(images)} digits by rows")
'''
CONFIGURATION = """
model:
  class_path: my_reader.RowReader
  init_args: {hidden_size: 6, lr: 0.01}
data:
  class_path: Digits
  init_args: {batch_size: 20, train_size: 100, val_size: 20}
trainer: {max_epochs: 1}
"""


def test_it_is_one_file(own_classes: Path) -> None:
    (own_classes / "my_reader.py").write_text(MODEL)
    (own_classes / "my_reader.yaml").write_text(CONFIGURATION)
    options = ["--model.norm=RMSNorm", "--test_after_fit=true"]
    done = run("fit", "--config=my_reader.yaml", *options, *QUIET)
    assert done.code == 0, done.err
    folder = Path("runs/RowReader-RMSNorm/version_0")
    results = json.loads((folder / "test_results.json").read_text())
    assert (results["model"], results["norm"]) == ("RowReader", "RMSNorm")
    assert 0 < results["metrics"]["nll"] < 10

    last, own = folder / "checkpoints/last.ckpt", "--import=my_reader"
    done = run("analyze", "dynamics", "--ckpt", last, own, "--batch=4")
    assert done.code == 0, done.err
    assert done.out.startswith("4 digits by rows, 8 steps")
    assert "last.ckpt trained" in done.out

    done = run("card", last, "--results", folder / "test_results.json", "--out=mine.reader", own)
    assert done.code == 0, done.err
    card = Path("mine.reader/README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    assert "print(model(torch.rand(1, 8, 8)).argmax(-1))" in card
