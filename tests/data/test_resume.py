"""Loaders under a trainer: resumption, several processes, Lightning's own samplers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from training import quiet_trainer

from ln_zoo.data import BatchLoader, ResumableLoader, Tensors
from ln_zoo.data.loading import whole_batch


class Numbers(LightningDataModule):
    """23 numbers in batches of 4: six batches, the last of three."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.tensors = Tensors(torch.arange(23.0)[:, None] / 23, torch.arange(23))

    def train_dataloader(self) -> ResumableLoader:
        options = {"training": True, "shuffle": True, "num_workers": self.num_workers}
        return ResumableLoader(self.tensors, 4, **options)

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(self.tensors, 3)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.tensors, batch_size=3, collate_fn=whole_batch)


class Recorder(LightningModule):
    """Fits a line and keeps the batches seen, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.line.weight)
        torch.nn.init.zeros_(self.line.bias)
        self.seen: dict[str, list] = {"train": [], "val": [], "test": []}

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        self.seen["train"].append((self.current_epoch, batch_idx, labels.tolist()))
        return (self.line(inputs)[:, 0] - labels).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch[1].tolist())
        self.log("val_mean", batch[0].mean(), batch_size=len(batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.seen["test"].append(batch[1].tolist())

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def make_trainer(*callbacks, **options) -> Trainer:
    return quiet_trainer(*callbacks, **{"max_epochs": 3, "num_sanity_val_steps": 0} | options)


@pytest.mark.parametrize(
    ("saving", "num_workers", "options"),
    [
        ({"every_n_train_steps": 1}, 0, {"max_epochs": 2}),
        ({"every_n_train_steps": 4}, 2, {}),
        ({"every_n_train_steps": 5}, 0, {"limit_train_batches": 4}),
        ({"every_n_train_steps": 5}, 0, {"max_epochs": -1, "max_steps": 14}),
        ({"every_n_epochs": 1}, 0, {}),
        pytest.param({"every_n_epochs": 1}, 2, {}, marks=pytest.mark.slow),
        ({"every_n_epochs": 1}, 0, {"limit_val_batches": 0}),
        ({"monitor": "val_mean"}, 0, {"val_check_interval": 2}),
    ],
    ids=str,
)
def test_every_checkpoint_resumes_with_exactly_the_remaining_batches(
    tmp_path, saving, num_workers, options
):
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **saving)
    whole = Recorder()
    make_trainer(checkpoints, **options).fit(whole, datamodule=Numbers(num_workers))
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) >= 2
    for file in files:
        step = torch.load(file, weights_only=True)["global_step"]
        resumed = Recorder()
        make_trainer(**options).fit(resumed, datamodule=Numbers(num_workers), ckpt_path=file)
        assert resumed.seen["train"] == whole.seen["train"][step:]
        assert torch.equal(resumed.line.weight, whole.line.weight)


def test_overfit_batches_takes_the_first_batches_in_order():
    model = Recorder()
    make_trainer(overfit_batches=2, max_epochs=2).fit(model, datamodule=Numbers())
    first = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [labels for _, _, labels in model.seen["train"]] == first * 2


@pytest.mark.slow
def test_two_processes_share_what_one_sees(tmp_path):
    alone = Recorder()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(alone, datamodule=Numbers())
    trainer.test(alone, datamodule=Numbers(), verbose=False)

    root, given = Path(__file__).parents[2], os.environ.get("PYTHONPATH", "")
    process = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], timeout=300, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}:{root / 'tests/data'}:{given}"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for stage in ("val", "test"):
        dealt = [batch for rank in ranks for batch in rank["seen"][stage]]
        assert sorted(dealt) == sorted(alone.seen[stage])
    steps = [(epoch, labels) for epoch, _, labels in alone.seen["train"]]
    for number, rank in enumerate(ranks):
        assert [(e, labels) for e, _, labels in rank["seen"]["train"]] == steps[number::2]
    # Resumed from the checkpoint after two of the three steps of epoch 0.
    for rank in ranks:
        assert rank["resumed"] == rank["seen"]["train"][2:]
    predicted = [pair for rank in ranks for pair in rank["predicted"]]
    assert sorted(predicted) == [[index, index] for index in range(23)]


def main(folder: Path) -> None:
    """One of two processes: writes what it saw to ``<rank>.json``."""
    from lightning.pytorch.callbacks import BasePredictionWriter

    predicted: list[tuple[int, int]] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, indices, *args):
            predicted.extend(zip(indices, prediction.tolist(), strict=True))

    def trainer(*callbacks, **options) -> Trainer:
        return make_trainer(*callbacks, strategy="ddp", devices=2, max_epochs=2, **options)

    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    model = Recorder()
    fitting = trainer(saving, Writer("batch"))
    fitting.fit(model, datamodule=Numbers())
    fitting.test(model, datamodule=Numbers(), verbose=False)
    fitting.predict(model, datamodule=Numbers(), return_predictions=False)
    resumed = Recorder()
    trainer().fit(resumed, datamodule=Numbers(), ckpt_path=folder / "step=2.ckpt")
    record = {"seen": model.seen, "resumed": resumed.seen["train"], "predicted": predicted}
    (folder / f"{fitting.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
