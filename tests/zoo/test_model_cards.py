"""Every published model of the repository: complete, small, current, and what its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from ln_zoo.zoo import catalog, load, render_card
from ln_zoo.zoo.publishing import front_matter

ROOT = Path(__file__).parents[2] / "model_cards"
FOLDERS = sorted(p for p in ROOT.glob("*") if (p / "config.json").is_file())
CONFIGS = ROOT.parent / "configs/cards"
MEGABYTE = 10**6
#: Of the tasks that the hub knows, those of these models.
HUB_TASKS = {
    "feature-extraction", "image-classification", "question-answering", "text-to-image",
    "unconditional-image-generation",
}  # fmt: skip


def test_sizes() -> None:
    sizes = {
        folder.name: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        for folder in FOLDERS
    }
    assert all(size <= 30 * MEGABYTE for size in sizes.values()), sizes
    assert sum(sizes.values()) <= 200 * MEGABYTE, sizes


def test_nothing_else_lies_there() -> None:
    assert [p.name for p in ROOT.glob("*") if p.is_dir() and p not in FOLDERS] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_published_model(folder: Path) -> None:
    card = catalog.read_card(folder)
    assert card.name == folder.name
    assert {p.name for p in folder.iterdir()} >= {*catalog.CARD_FILES, *card.config["files"]}
    assert (folder / "README.md").read_text(encoding="utf-8") == render_card(folder)

    model = load(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == card.parameters
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (kind,) = {v.dtype for v in state.values() if v.is_floating_point()}
    assert kind in (torch.float32, torch.float16)
    assert all(torch.isfinite(v).all() for v in state.values())
    assert card.preprocessing
    stated = card.results["card"]
    assert stated.keys() >= {"intended_use", "limitations", "uncertainty", "description"}
    facts = yaml.safe_load((CONFIGS / f"{card.name}.yaml").read_text(encoding="utf-8"))
    apart = {"main_metric", "training_commands", "size", "pictures"}
    assert {k: v for k, v in stated.items() if k not in apart} == {
        k: v for k, v in facts.items() if k not in apart
    }
    front = front_matter(card)
    assert front.pipeline_tag in HUB_TASKS
    assert set(front.datasets or ()) <= {"ylecun/mnist"}
    # The example runs as it stands.
    (example,) = re.findall(r"```python\n(.*?)```", render_card(folder), re.DOTALL)
    if card.model != "DRAW":  # seconds: its method has a test of its own
        exec(example, {})
    assert card.results["training"]["commands"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_path_of_the_machine_it_was_made_on(folder: Path) -> None:
    for name in ("config.json", "results.json", "README.md"):
        text = (folder / name).read_text(encoding="utf-8")
        assert re.findall(r"(?<![\w.:/])/(?:home|root|work|tmp|Users|mnt|data)/", text) == [], name
    evaluation = json.loads((folder / "results.json").read_text())["evaluation"]
    assert evaluation["command"].startswith("ln-zoo test")
