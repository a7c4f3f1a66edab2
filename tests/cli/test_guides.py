"""Commands of the guides in this process: networks that go on with other data, tools."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CONFIGS, QUIET, Capture, Patch
from refusals import refuses
from torch import Tensor

from ln_zoo.cli.lightning import ZooCLI
from ln_zoo.data import Digits
from ln_zoo.zoo import load

CONFIG = CONFIGS / "fine_tune/digits.yaml"
OFF = [f"--trainer.{name}=false" for name in ("logger", "enable_checkpointing")]


class OddOrEven(Digits):
    """Two classes."""

    num_classes = 2

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (images, labels % 2) for name, (images, labels) in super().read().items()}


@pytest.fixture(autouse=True)
def _surroundings(in_tmp: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set again by each command, and put back


def build(command: str, *argv: str | Path) -> ZooCLI:
    return ZooCLI([command, *map(str, argv), *OFF, *QUIET, "--trainer.accelerator=cpu"])


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


def test_the_configuration_trains_the_last_layer_first() -> None:
    cli = build("fit", "--config", CONFIG, "--data.train_size=40", "--trainer.max_epochs=1",
                "--test_after_fit=false")  # fmt: skip
    published = load("conv.layernorm").state_dict()
    assert differing(cli.model.state_dict(), published) == set()
    cli.run()
    head = {"network.13.weight", "network.13.bias"}
    assert differing(cli.model.state_dict(), published) == head


def test_other_classes_get_a_new_last_layer(capsys: Capture) -> None:
    arguments: tuple[Any, ...] = ("--weights=mlp.layernorm-digits", f"--data={__name__}.OddOrEven")
    cli = build("fit", *arguments, "--trainer.max_steps=1")
    note = capsys.readouterr().err
    head = ("network.5.weight", "network.5.bias")
    assert all(word in note for word in ("2 classes", *head, "mlp.layernorm-digits"))
    assert cli.model.new_weights == head
    published = load("mlp.layernorm-digits").state_dict()
    assert differing(cli.model.state_dict(), published) == set(head)
    assert cli.model.head.weight.shape[0] == 2
    cli.run()
    assert cli.trainer.global_step == 1
    # An untrained last layer is nothing to test.
    refuses(r"network\.5\.weight.*\[10, 256\]", build, "test", *arguments)
    refuses(r"mlp\.layernorm-digits", build, "fit", *arguments, "--model.hidden_sizes=[9, 9]")


# Lightning's tools that change what the zoo stores or writes

SMALL = ("--trainer.accelerator=cpu", "--model.hidden_sizes=[8]", "--data.val_size=50")


def run(heading: str, *more: str) -> ZooCLI:
    """Runs the command under a heading of the page on tools."""
    page = (CONFIGS.parent / "docs/how-to/training_tools.md").read_text()
    command = re.split("```(?:bash)?\n", page.partition(f"\n## {heading}\n")[2])[1]
    argv = command.replace(" configs/", f" {CONFIGS}/")
    cli = ZooCLI([*shlex.split(argv)[1:], *more, *SMALL, *QUIET, "--test_after_fit=false"])
    cli.run()
    return cli


def test_a_learning_rate_is_found() -> None:
    options = ("--data.batch_size=32", "--trainer.callbacks.num_training_steps=40")
    cli = run("Find a learning rate", "--trainer.max_epochs=1", *options)
    assert cli.trainer.global_step == 41  # of 1,297 images, 32 an update
    assert 1e-8 < cli.model.lr < 1
    assert cli.model.lr != 1e-3
    assert [group["lr"] for group in cli.trainer.optimizers[0].param_groups] == [cli.model.lr]
    assert not list(Path().glob(".lr_find*"))


def test_weights_are_averaged() -> None:
    """The checkpoint holds the average, which differs from the weights of the last update."""
    cli = run("Average the weights", "--trainer.max_epochs=2", "--data.train_size=256")
    (path,) = Path().rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    current = checkpoint["current_model_state"]
    for name, average in cli.model.named_parameters():
        assert torch.equal(checkpoint["state_dict"][name], average)
    assert not torch.equal(current["network.1.weight"], cli.model.network[1].weight)
