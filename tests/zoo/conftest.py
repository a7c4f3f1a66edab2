"""Cards and checkpoints of a tiny model, and a hub on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from training import quiet_trainer
from zoo_support import PREPROCESSING, RESULTS, MakeCard, StubHub, Tested, tiny

from ln_zoo.data import BatchLoader, Tensors
from ln_zoo.norms import BatchNorm, Identity, Norm
from ln_zoo.zoo import catalog
from ln_zoo.zoo.publishing import write_card


@pytest.fixture
def make_card(tmp_path: Path) -> MakeCard:
    """Writes a card of a tiny model below tmp_path/cards."""

    def make(name: str = "mlp.layernorm", norm: Norm | None = None, **changes: Any) -> Path:
        folder = tmp_path / "cards" / name
        return write_card(folder, tiny(norm), RESULTS | changes, preprocessing=PREPROCESSING)

    return make


@pytest.fixture
def models_folder(tmp_path: Path, make_card: MakeCard, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cards of LayerNorm, BatchNorm and Identity in the folder that LN_ZOO_MODELS names, only."""
    monkeypatch.setattr(catalog, "SHIPPED", ())
    make_card("mlp.layernorm")
    make_card("mlp.batchnorm", BatchNorm())
    other = [{**metric, "dataset": "mnist"} for metric in RESULTS["metrics"]]
    make_card("mlp.none", Identity(), metrics=other)
    monkeypatch.setenv("LN_ZOO_MODELS", str(tmp_path / "cards"))
    return tmp_path / "cards"


@pytest.fixture
def tested_checkpoint(tmp_path: Path) -> Tested:
    """A Lightning checkpoint, and the file that a test run of it leaves."""
    model = tiny()
    inputs = torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    loader = BatchLoader(Tensors(inputs, torch.arange(8)), 4)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, loader)
    checkpoint = tmp_path / "best.ckpt"
    trainer.save_checkpoint(checkpoint)
    (measured,) = trainer.test(model, loader, verbose=False)
    done = {"dataset": "digits", "epochs": 1, "steps": 2}
    stated = {
        "model": "MLPClassifier", "norm": "LayerNorm", "metrics": measured, "seed": 0,
        "data": {"dataset": "digits", "batch_size": 4}, "preprocessing": PREPROCESSING,
        "precision": "32-true", "processes": 1, "hardware": "2 CPU cores", "date": "2025-01-31",
        "command": "ln-zoo test --ckpt_path best.ckpt", "versions": {"torch": torch.__version__},
        "epochs": 1, "steps": 2, "training_runs": [done], "checkpoint": "best.ckpt",
        "checkpoint_sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
    }  # fmt: skip
    results = tmp_path / "test_results.json"
    results.write_text(json.dumps(stated))
    return checkpoint, results


@pytest.fixture
def stub_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    """A hub on loopback that huggingface_hub uses in place of the real one, with an empty cache."""
    constants = huggingface_hub.constants
    stub = StubHub()
    monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    # The chunked transfer has servers of its own; without it files go by HTTP and git LFS.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
