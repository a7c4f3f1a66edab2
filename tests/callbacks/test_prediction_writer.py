"""Predictions as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from refusals import refuses
from torch.utils.data import DataLoader, TensorDataset
from training import quiet_trainer

from ln_zoo.callbacks import PredictionWriter
from ln_zoo.data import BatchLoader, Tensors

LOADER = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)


class Twice(LightningModule):
    def predict_step(self, batch, batch_idx):
        return {"twice": 2 * batch[0], "pair": torch.stack([batch[0], -batch[0]], 1)}


class Bare(LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[0]


class Odd(LightningModule):
    def predict_step(self, batch, batch_idx):
        return tuple(batch)


def predict(model: LightningModule, loader: DataLoader, folder: Path) -> list[dict]:
    writer = PredictionWriter(str(folder / "out/mine.jsonl"))
    quiet_trainer(writer).predict(model, loader)
    assert writer.written == folder / "out/mine.jsonl"
    return [json.loads(line) for line in writer.written.read_text().splitlines()]


def test_a_line_for_each_example(tmp_path: Path) -> None:
    expected = [{"index": i, "twice": 2.0 * i, "pair": [float(i), -float(i)]} for i in range(5)]
    assert predict(Twice(), LOADER, tmp_path) == expected
    # A second time: the file is written anew.
    assert predict(Twice(), LOADER, tmp_path) == expected


def test_the_index_is_that_in_the_dataset(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2, sampler=[4, 0, 3])
    lines = predict(Twice(), loader, tmp_path)
    assert [(line["index"], line["twice"]) for line in lines] == [(4, 8.0), (0, 0.0), (3, 6.0)]


def test_no_index_where_lightning_knows_none(tmp_path: Path) -> None:
    loader = BatchLoader(Tensors(torch.arange(5.0), torch.arange(5)), 2)
    lines = predict(Twice(), loader, tmp_path)
    assert [line["twice"] for line in lines] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert "index" not in lines[0]


class Failing(Twice):
    def predict_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("no more")
        return super().predict_step(batch, batch_idx)


def test_after_an_error_the_former_predictions_are_there(tmp_path: Path) -> None:
    before = predict(Twice(), LOADER, tmp_path)
    refuses("no more", predict, Failing(), LOADER, tmp_path, error=RuntimeError)
    (path,) = (tmp_path / "out").iterdir()
    assert [json.loads(line) for line in path.read_text().splitlines()] == before


def test_a_dry_run_writes_nothing(in_tmp: Path) -> None:
    writer = PredictionWriter()
    quiet_trainer(writer, fast_dev_run=True).predict(Twice(), LOADER)
    assert writer.written is None
    assert list(in_tmp.iterdir()) == []


def test_a_tensor_is_one_column(tmp_path: Path) -> None:
    assert predict(Bare(), LOADER, tmp_path)[2] == {"index": 2, "prediction": 2.0}


def test_anything_else_is_refused(tmp_path: Path) -> None:
    message = r"predict_step of Odd .*dict.*tuple"
    refuses(message, predict, Odd(), LOADER, tmp_path, error=TypeError)
