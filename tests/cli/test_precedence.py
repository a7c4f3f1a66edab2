"""Which value wins: command line over file over card or checkpoint over default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import CONFIGS, DATA, SMALL, Patch, succeed

from ln_zoo.norms import RMSNorm


def settings(*argv: str | Path) -> dict[str, Any]:
    """The settings that ``fit`` would use."""
    found: dict[str, Any] = yaml.safe_load(succeed("fit", *argv, "--print_config").out)
    return found


def model(*argv: str | Path) -> dict[str, Any]:
    """The model's arguments, the class among them."""
    found = settings(*argv, *DATA)["model"]
    return {"class": found["class_path"].rpartition(".")[2], **found["init_args"]}


@pytest.fixture
def start(here: Path, trained: Path) -> list[str | Path]:
    """Options that start from a checkpoint with ``lr`` 0.01, and a file with 0.02."""
    (here / "mine.yaml").write_text("model: {init_args: {lr: 0.02}}\n")
    return ["--weights", trained]


def test_command_line_over_file_over_weights_over_default(start: list[str | Path]) -> None:
    file, own = "--config=mine.yaml", "--model.lr=0.03"
    assert model(*start)["lr"] == 0.01
    assert model(*start, file)["lr"] == model(file, *start)["lr"] == 0.02
    for argv in ([*start, file, own], [file, own, *start]):
        assert model(*argv)["lr"] == 0.03, argv
    # Nothing else of the weights' model changes.
    found = model(*start, file, own)
    assert (found["class"], found["hidden_sizes"]) == ("MLPClassifier", [8])
    assert model("--model=MLPClassifier")["lr"] == 0.001  # the default


def test_a_later_file_wins_over_an_earlier_one(here: Path) -> None:
    for name, rate in (("a", 1), ("b", 2)):
        (here / f"{name}.yaml").write_text(f"model: {{init_args: {{lr: {rate}}}}}\n")
    start = ["--model=MLPClassifier"]
    assert model(*start, "--config=a.yaml", "--config=b.yaml")["lr"] == 2
    assert model(*start, "--config=b.yaml", "--config=a.yaml")["lr"] == 1
    # The class may follow the file of its arguments.
    assert model("--config=a.yaml", *start)["lr"] == 1


def test_a_norm_file_replaces_the_whole_norm_and_its_fields_can_be_set(
    start: list[str | Path],
) -> None:
    rms = f"--config={CONFIGS / 'norms/rms.yaml'}"
    norm = model(*start, rms)["norm"]
    assert norm["class_path"] == "ln_zoo.norms.RMSNorm"
    assert set(norm["init_args"]) == {field.name for field in fields(RMSNorm)}
    norm = model(*start, rms, "--model.norm.eps=0.5")["norm"]
    assert (norm["class_path"], norm["init_args"]["eps"]) == ("ln_zoo.norms.RMSNorm", 0.5)
    assert model(*start, "--model.norm.eps=0.5")["norm"]["init_args"]["eps"] == 0.5
    assert model(*start, rms, "--model.norm=BatchNorm")["norm"]["class_path"].endswith("BatchNorm")


def test_the_environment_is_below_files_and_above_defaults(here: Path, monkeypatch: Patch) -> None:
    assert settings(*SMALL)["seed_everything"] == 0
    monkeypatch.setenv("LN_ZOO_FIT__SEED_EVERYTHING", "5")
    (here / "seed.yaml").write_text("seed_everything: 6\n")
    assert settings(*SMALL)["seed_everything"] == 5
    assert settings(*SMALL, "--config=seed.yaml")["seed_everything"] == 6
    assert settings(*SMALL, "--seed_everything=7", "--config=seed.yaml")["seed_everything"] == 6
    assert settings(*SMALL, "--config=seed.yaml", "--seed_everything=7")["seed_everything"] == 7


def test_weights_and_checkpoints_of_arguments_over_those_of_files(
    here: Path, trained: Path
) -> None:
    """A run's ``config.yaml`` has ``ckpt_path: null``, or the weights that it began with."""
    (here / "run.yaml").write_text("ckpt_path: null\nweights: mlp.none\n")
    for argv in (["--ckpt_path", trained, "--config=run.yaml"],
                 ["--config=run.yaml", "--ckpt_path", trained]):  # fmt: skip
        found = settings(*argv, *DATA)
        assert (found["ckpt_path"], found["weights"]) == (str(trained), None)
        assert found["model"]["init_args"]["hidden_sizes"] == [8]
    found = settings("--config=run.yaml", "--weights", trained, *DATA)
    assert (found["weights"], found["model"]["init_args"]["lr"]) == (str(trained), 0.01)
