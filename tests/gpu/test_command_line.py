"""The command line on a GPU: a training step of every model under every norm, and cards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from outcomes import devices, gpu, slow

from ln_zoo.cli import main
from ln_zoo.zoo import describe

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
FEW = ("--data=Digits", "--data.train_size=1000", "--data.val_size=400", "--data.batch_size=100")
#: Every configuration that needs no download, and two that run on digits in place of MNIST.
RUNS = {
    **{str(f.relative_to(CONFIGS)): () for f in sorted(CONFIGS.rglob("quickstart.yaml"))},
    "pixels/permuted.yaml": (*FEW, "--model.in_features=64"),
    "conv/mnist.yaml": (*FEW, "--data.image_size=28"),
}
NORMS = sorted(path.stem for path in (CONFIGS / "norms").glob("*.yaml"))
#: Cards of which the weights are small, with the images of a test set.
CARDS = {
    "mlp.layernorm-digits": ("Digits", 300),
    "mlp.layernorm": ("MNIST", 10_000),
    "conv.layernorm": ("MNIST", 10_000),
    "pixels.layernorm": ("MNIST", 10_000),
    "pixels.none": ("MNIST", 10_000),
    "pixels.batchnorm": ("MNIST", 10_000),
}
ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}


@pytest.fixture(autouse=True)
def _surroundings(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own; seeds that a command sets are put back."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def allocated() -> int:
    """Bytes of the GPU that were ever allocated."""
    return int(torch.cuda.memory_stats().get("allocated_bytes.all.allocated", 0))


def ran_on(device: str, *argv: str | Path) -> int:
    """The exit code of a command, which has to use the device's memory."""
    before = allocated() if device == "cuda" else 0
    code = main([*map(str, argv), f"--trainer.accelerator={ACCELERATORS[device]}", *QUIET])
    assert device != "cuda" or allocated() > before
    return code


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cpu", "bf16-mixed", marks=slow),
        pytest.param("cuda", "bf16-mixed", marks=gpu),
        pytest.param("cuda", "16-mixed", marks=gpu),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("config", RUNS)
def test_a_training_step(device: str, precision: str, norm: str, config: str) -> None:
    base, overlay = CONFIGS / config, CONFIGS / f"norms/{norm}.yaml"
    short = ("--trainer.fast_dev_run=1", f"--trainer.precision={precision}")
    code = ran_on(device, "fit", "--config", base, "--config", overlay, *RUNS[config], *short)
    assert code == 0


@devices
@pytest.mark.parametrize("norm", ["layer", "none", "batch"])
def test_pixels_train_in_float32(device: str, norm: str) -> None:
    """Two epochs of the published baseline's configuration, with a checkpoint to test."""
    base, overlay = CONFIGS / "pixels/permuted.yaml", CONFIGS / f"norms/{norm}.yaml"
    extra = (*RUNS["pixels/permuted.yaml"], "--trainer.max_epochs=2", "--test_after_fit=true")
    code = ran_on(device, "fit", "--config", base, "--config", overlay, *extra)
    assert code == 0
    (results,) = Path("runs").rglob("test_results.json")
    # Lightning moves the model to the CPU before the results are written.
    kind = "GPU, " if device == "cuda" else "CPU, "
    assert json.loads(results.read_text())["hardware"].startswith(kind)


@devices
@pytest.mark.parametrize("name", CARDS)
def test_a_card_scores_what_it_says(device: str, name: str) -> None:
    data, images = CARDS[name]
    if not (ROOT / "model_cards" / name / "model.safetensors").is_file():
        pytest.skip("its weights are not in this checkout")
    if data != "Digits" and "LN_ZOO_DATA" not in os.environ:
        pytest.skip("LN_ZOO_DATA names no folder of data")
    assert ran_on(device, "test", "--weights", name, "--data", data) == 0
    (file,) = Path("runs").rglob("test_results.json")
    found = json.loads(file.read_text())["metrics"]
    metrics = {m["name"]: m["value"] for m in describe(name).metrics}
    assert metrics
    for metric, value in metrics.items():
        # Two images may lie so near a boundary that rounding decides.
        slack = 2 / images if metric in ("error", "accuracy") else 1e-3 * value
        assert found[metric] == pytest.approx(value, abs=slack), metric
