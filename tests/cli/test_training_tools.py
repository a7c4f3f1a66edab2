"""Every command of the page on Lightning's tools, in one process, smaller, and what it did."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.cli.lightning import ZooCLI

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/training_tools.md"
SMALL = (
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--model.hidden_sizes=[8]",
    "--data.val_size=50",
    "--test_after_fit=false",
)


class Weights(Callback):
    """The weights after each update."""

    def __init__(self) -> None:
        self.after: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        self.after.append([p.detach().double().clone() for p in module.parameters()])


def commands() -> dict[str, list[str]]:
    """The command under each heading."""
    sections = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        heading: shlex.split(text.split("```bash\n")[1].partition("```")[0])
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }


def found_a_rate(cli: ZooCLI, weights: Weights) -> None:
    assert cli.trainer.global_step == 41  # of 1,297 images, 32 an update
    rate = cli.model.lr
    assert rate != 1e-3
    assert 1e-8 < rate < 1
    assert [group["lr"] for group in cli.trainer.optimizers[0].param_groups] == [rate]
    assert not list(Path().glob(".lr_find*"))


def stopped(cli: ZooCLI, weights: Weights) -> None:
    """The first epoch is the best if nothing counts as better; then patience is three."""
    assert cli.trainer.current_epoch == 4
    assert cli.trainer.max_epochs == 100


def averaged(cli: ZooCLI, weights: Weights) -> None:
    """The first weights, then 0.99 of the average and 0.01 of each that follow, in float64."""
    expected, *others = weights.after
    assert len(others) == 7
    for other in others:
        expected = [0.99 * e + 0.01 * o for e, o in zip(expected, other, strict=True)]
    for parameter, average, last in zip(
        cli.model.parameters(), expected, weights.after[-1], strict=True
    ):
        # Eight roundings of numbers of this size in float32.
        size = average.abs().max().item()
        torch.testing.assert_close(parameter.double(), average, rtol=0, atol=8 * 6e-8 * size)
        assert not torch.equal(parameter.double(), last)


def accumulated(cli: ZooCLI, weights: Weights) -> None:
    assert len(weights.after) == 16  # batches
    assert cli.trainer.global_step == 4  # updates


def lowered(cli: ZooCLI, weights: Weights) -> None:
    """Half of it after each three epochs that were not better, which none is but the first."""
    with Path(cli.trainer.loggers[0].log_dir, "metrics.csv").open() as lines:
        rates = [float(row["lr-Adam"]) for row in csv.DictReader(lines) if row["lr-Adam"]]
    assert rates == [1e-3] * 4 + [5e-4] * 3 + [2.5e-4]


def logged_twice(cli: ZooCLI, weights: Weights) -> None:
    first = Path(cli.trainer.loggers[0].log_dir, "metrics.csv").read_text()
    assert "val_nll" in first
    assert Path("elsewhere/mine/version_0/metrics.csv").read_text() == first
    assert len(cli.trainer.loggers) == 3


#: Of each section: what makes it small, and what it must have done.
SECTIONS: dict[str, tuple[tuple[str, ...], Callable[[ZooCLI, Weights], None]]] = {
    "Find a learning rate": (
        ("--trainer.max_epochs=1", "--data.batch_size=32",
         "--trainer.callbacks.num_training_steps=40"),
        found_a_rate,
    ),
    "Stop early": (("--data.train_size=64", "--trainer.callbacks.min_delta=100"), stopped),
    "Average the weights": (("--trainer.max_epochs=2", "--data.train_size=256"), averaged),
    "Batches larger than memory": (
        ("--trainer.max_epochs=1", "--data.train_size=256"),
        accumulated,
    ),
    "Lower the rate on a plateau": (
        ("--trainer.max_epochs=8", "--data.train_size=64", "--trainer.log_every_n_steps=1",
         "--lr_scheduler.threshold=100", "--lr_scheduler.threshold_mode=abs"),
        lowered,
    ),
    "A second logger": (("--trainer.max_epochs=1", "--data.train_size=64"), logged_twice),
}  # fmt: skip


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_command_of_the_page(
    heading: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set again by each command, and put back
    small, done = SECTIONS[heading]
    program, *argv = commands()[heading]
    assert program == "ln-zoo"
    argv = [str(ROOT / word) if word.startswith("configs/") else word for word in argv]
    cli = ZooCLI([*argv, *small, *SMALL])
    weights = Weights()
    cli.trainer.callbacks.insert(0, weights)  # before what puts others in their place
    cli.run()
    done(cli, weights)


def test_every_section_is_run() -> None:
    assert list(commands()) == list(SECTIONS)
