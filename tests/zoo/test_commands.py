"""``ln-zoo list``, ``cards``, ``card`` and ``publish``."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from zoo_support import StubHub

from ln_zoo.cli import main
from ln_zoo.zoo import catalog, load

Capture = pytest.CaptureFixture[str]


def test_list(models_folder: Path, capsys: Capture) -> None:
    assert main(["list", "mlp.*", "--norm", "LayerNorm", "--dataset", "digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "mlp.layernorm"]
    assert main(["list", "nothing*"]) == 0
    assert "no model matches" in capsys.readouterr().out


def test_a_table_of_results(models_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "results.csv"
    assert main(["list", "mlp.*", "--dataset", "digits", "--csv", str(file)]) == 0
    assert capsys.readouterr().out == f"results: {file} (2 models)\n"
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    keys = [(row["name"], row["metric"], float(row["value"]), row["unit"]) for row in rows]
    assert keys == [
        (name, *metric)
        for name in ("mlp.batchnorm", "mlp.layernorm")
        for metric in (("error", 0.0525, "fraction"), ("nll", 0.1875, "nats"))
    ]
    assert rows[0]["norm"] == "BatchNorm"
    assert rows[0]["seed"] == "3"
    assert rows[0]["sha256"] == catalog.describe("mlp.batchnorm").digest
    assert main(["list", "--csv", str(file / "x.csv")]) == 1
    assert str(file / "x.csv") in capsys.readouterr().err


def test_cards(models_folder: Path, capsys: Capture) -> None:
    assert main(["cards"]) == 0
    assert str(models_folder / "mlp.none") in capsys.readouterr().out
    assert main(["cards", "mlp.none"]) == 0
    assert capsys.readouterr().out == (models_folder / "mlp.none" / "README.md").read_text()
    assert main(["cards", "mlp.nun"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ln-zoo cards: error: ")
    assert "did you mean mlp.none" in captured.err


def test_cards_are_refreshed(models_folder: Path, capsys: Capture) -> None:
    pages = {name: models_folder / name / "README.md" for name in ("mlp.none", "mlp.layernorm")}
    texts = {name: page.read_text() for name, page in pages.items()}
    weights = (models_folder / "mlp.none" / "model.safetensors").read_bytes()
    for page in pages.values():
        page.write_text("old")
    assert main(["cards", "mlp.none", "--refresh"]) == 0
    assert capsys.readouterr().out == f"card: {pages['mlp.none']}\n"
    assert pages["mlp.none"].read_text() == texts["mlp.none"]
    assert pages["mlp.layernorm"].read_text() == "old"
    assert main(["cards", "--refresh"]) == 0
    assert {name: page.read_text() for name, page in pages.items()} == texts
    assert (models_folder / "mlp.none" / "model.safetensors").read_bytes() == weights


def test_card(tested_checkpoint: tuple[Path, Path], tmp_path: Path, capsys: Capture) -> None:
    checkpoint, results = map(str, tested_checkpoint)
    facts = tmp_path / "facts.yaml"
    facts.write_text("notes: [by command]\n")
    out = tmp_path / "cards" / "mlp.tiny"
    argv = [checkpoint, "--results", results, "--out", str(out), "--facts", str(facts)]
    assert main(["card", *argv, "--name", "tiny"]) == 0
    assert capsys.readouterr().out == f"card: {out}\n"
    assert load(out).card.name == "tiny"
    assert load(out).card.results["card"] == {"notes": ["by command"]}

    assert main(["card", *argv]) == 1
    assert "--overwrite" in capsys.readouterr().err
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 100_000)
    assert main(["card", checkpoint, "--results", str(nested), "--out", str(tmp_path / "x")]) == 1
    assert str(nested) in capsys.readouterr().err
    assert main(["card", *argv, "--overwrite"]) == 0
    assert load(out).card.name == "mlp.tiny"


def test_publish(models_folder: Path, stub_hub: StubHub, capsys: Capture) -> None:
    argv = ["mlp.none", "--repo_id", "someone/mlp-none", "--private"]
    assert main(["publish", *argv, "--dry_run"]) == 0
    assert "would be uploaded to" in capsys.readouterr().out
    assert main(["publish", *argv]) == 0
    assert f"published: {stub_hub.url}/someone/mlp-none/commit/" in capsys.readouterr().out
    assert stub_hub.private == {"someone/mlp-none": True}
    assert main(["publish", "mlp.nun", "--repo_id", "someone/x"]) == 1
    assert "mlp.none" in capsys.readouterr().err
    assert main(["publish", "mlp.none"]) == 2
    assert "--repo_id" in capsys.readouterr().err


def test_parsing_needs_no_torch(models_folder: Path) -> None:
    code = """
import sys
from ln_zoo.cli import main
for words in ("list --norm Identity", "cards", "cards mlp.none", "card --help", "publish --help"):
    assert main(words.split()) == 0
heavy = {"torch", "lightning", "huggingface_hub", "safetensors", "rich", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
