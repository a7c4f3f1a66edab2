"""Trained networks that go on with other data, with a new last layer where classes differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CONFIGS, QUIET
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
def _surroundings(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_classes_get_a_new_last_layer(capsys: pytest.CaptureFixture[str]) -> None:
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
    with pytest.raises(ValueError, match=r"network\.5\.weight is \(10, 256\)"):
        build("test", *arguments)
    with pytest.raises(ValueError, match=r"mlp\.layernorm-digits"):
        build("fit", *arguments, "--model.hidden_sizes=[9, 9]")
