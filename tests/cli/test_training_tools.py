"""Commands of the page on Lightning's tools that change what the zoo stores or writes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_support import QUIET

from ln_zoo.cli.lightning import ZooCLI

ROOT = Path(__file__).parents[2]
SMALL = ("--trainer.accelerator=cpu", "--model.hidden_sizes=[8]", "--data.val_size=50")


@pytest.fixture
def run(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ZooCLI]:
    """Runs the command under a heading of the page."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set again by each command, and put back

    def run(heading: str, *more: str) -> ZooCLI:
        page = (ROOT / "docs/how-to/training_tools.md").read_text()
        command = re.split("```(?:bash)?\n", page.partition(f"\n## {heading}\n")[2])[1]
        argv = command.replace(" configs/", f" {ROOT}/configs/")
        cli = ZooCLI([*shlex.split(argv)[1:], *more, *SMALL, *QUIET, "--test_after_fit=false"])
        cli.run()
        return cli

    return run


def test_a_learning_rate_is_found(run: Callable[..., ZooCLI]) -> None:
    options = ("--data.batch_size=32", "--trainer.callbacks.num_training_steps=40")
    cli = run("Find a learning rate", "--trainer.max_epochs=1", *options)
    assert cli.trainer.global_step == 41  # of 1,297 images, 32 an update
    assert 1e-8 < cli.model.lr < 1
    assert cli.model.lr != 1e-3
    assert [group["lr"] for group in cli.trainer.optimizers[0].param_groups] == [cli.model.lr]
    assert not list(Path().glob(".lr_find*"))


def test_weights_are_averaged(run: Callable[..., ZooCLI]) -> None:
    """The checkpoint holds the average, which differs from the weights of the last update."""
    cli = run("Average the weights", "--trainer.max_epochs=2", "--data.train_size=256")
    (path,) = Path().rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    current = checkpoint["current_model_state"]
    for name, average in cli.model.named_parameters():
        assert torch.equal(checkpoint["state_dict"][name], average)
    assert not torch.equal(current["network.1.weight"], cli.model.network[1].weight)
