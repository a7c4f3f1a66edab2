"""``ln-zoo list``, ``cards``, ``card`` and ``publish``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli_support import Capture, rows_of, told
from zoo_support import StubHub

from ln_zoo.cli import main
from ln_zoo.zoo import catalog, load


def test_list(models_folder: Path, capsys: Capture) -> None:
    given = ("--norm", "LayerNorm", "--dataset", "digits")
    lines = told(capsys, "list", "mlp.*", *given).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "mlp.layernorm"]
    assert "no model matches" in told(capsys, "list", "nothing*")


def test_a_table_of_results(models_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "results.csv"
    printed = told(capsys, "list", "mlp.*", "--dataset", "digits", "--csv", file)
    assert printed == f"results: {file} (2 models)\n"
    rows = rows_of(file)
    keys = [(row["name"], row["metric"], float(row["value"]), row["unit"]) for row in rows]
    metrics = ("error", 0.0525, "fraction"), ("nll", 0.1875, "nats")
    names = ("mlp.batchnorm", "mlp.layernorm")
    assert keys == [(name, *metric) for name in names for metric in metrics]
    digest = catalog.describe("mlp.batchnorm").digest
    assert [rows[0][key] for key in ("norm", "seed", "sha256")] == ["BatchNorm", "3", digest]
    assert str(file / "x.csv") in told(capsys, "list", "--csv", file / "x.csv", code=1)


def test_cards(models_folder: Path, capsys: Capture) -> None:
    assert str(models_folder / "mlp.none") in told(capsys, "cards")
    page = (models_folder / "mlp.none" / "README.md").read_text()
    assert told(capsys, "cards", "mlp.none") == page
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
    assert told(capsys, "cards", "mlp.none", "--refresh") == f"card: {pages['mlp.none']}\n"
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
    first, note = told(capsys, "card", *argv, "--name", "tiny").splitlines()
    assert first == f"card: {out}"
    assert "license" in note
    assert load(out).card.name == "tiny"
    assert load(out).card.results["card"] == {"notes": ["by command"]}

    assert "--overwrite" in told(capsys, "card", *argv, code=1)
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 100_000)
    wrong = ("--results", nested, "--out", tmp_path / "x")
    assert str(nested) in told(capsys, "card", checkpoint, *wrong, code=1)
    assert main(["card", *argv, "--overwrite"]) == 0
    assert load(out).card.name == "mlp.tiny"


def test_publish(models_folder: Path, stub_hub: StubHub, capsys: Capture) -> None:
    argv = ["mlp.none", "--repo_id", "someone/mlp-none", "--private"]
    assert "would be uploaded to" in told(capsys, "publish", *argv, "--dry_run")
    commit = f"{stub_hub.url}/someone/mlp-none/commit/"
    assert f"published: {commit}" in told(capsys, "publish", *argv)
    assert stub_hub.private == {"someone/mlp-none": True}
    assert "mlp.none" in told(capsys, "publish", "mlp.nun", "--repo_id", "someone/x", code=1)
    assert "--repo_id" in told(capsys, "publish", "mlp.none", code=2)


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
