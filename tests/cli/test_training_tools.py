"""Commands of the page on Lightning's tools that change what the zoo stores or writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.cli.lightning import ZooCLI

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/training_tools.md"
SMALL = (
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--model.hidden_sizes=[8]", "--data.val_size=50",
    "--test_after_fit=false",
)  # fmt: skip


class Weights(Callback):
    """The weights after each update."""

    def __init__(self) -> None:
        self.after: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        self.after.append([p.detach().double().clone() for p in module.parameters()])


@pytest.fixture
def run(in_tmp: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command under a heading of the page."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set again by each command, and put back

    def run(heading: str, *small: str) -> tuple[ZooCLI, list[list[Tensor]]]:
        text = PAGE.read_text().partition(f"\n## {heading}\n")[2]
        argv = shlex.split(re.split("```(?:bash)?\n", text)[1])[1:]
        argv = [str(ROOT / word) if word.startswith("configs/") else word for word in argv]
        cli, weights = ZooCLI([*argv, *small, *SMALL]), Weights()
        cli.trainer.callbacks.insert(0, weights)  # before what puts others in their place
        cli.run()
        return cli, weights.after

    return run


def test_a_learning_rate_is_found(run) -> None:
    options = ("--data.batch_size=32", "--trainer.callbacks.num_training_steps=40")
    cli, _ = run("Find a learning rate", "--trainer.max_epochs=1", *options)
    assert cli.trainer.global_step == 41  # of 1,297 images, 32 an update
    assert 1e-8 < cli.model.lr < 1
    assert cli.model.lr != 1e-3
    assert [group["lr"] for group in cli.trainer.optimizers[0].param_groups] == [cli.model.lr]
    assert not list(Path().glob(".lr_find*"))


def test_weights_are_averaged(run) -> None:
    """The first weights, then 0.99 of the average and 0.01 of each that follow, in float64."""
    cli, (expected, *others) = run(
        "Average the weights", "--trainer.max_epochs=2", "--data.train_size=256"
    )
    assert len(others) == 7
    for other in others:
        expected = [0.99 * e + 0.01 * o for e, o in zip(expected, other, strict=True)]
    for parameter, average in zip(cli.model.parameters(), expected, strict=True):
        # Eight roundings of numbers of this size in float32.
        size = average.abs().max().item()
        torch.testing.assert_close(parameter.double(), average, rtol=0, atol=8 * 6e-8 * size)
