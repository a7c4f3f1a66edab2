"""What ``test`` prints and writes: measured beside reported numbers."""

from __future__ import annotations

import json
import os
import platform
import shlex
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from ln_zoo._version import __version__
from ln_zoo.zoo.reported import comparison, render

if TYPE_CHECKING:
    from ln_zoo.cli.lightning import ZooCLI


def report(cli: ZooCLI) -> None:
    """Prints the table of the test that has just run, and writes ``test_results.json``."""
    trainer = cli.trainer
    if not trainer.is_global_zero:
        return
    results = collect(cli)
    rows = comparison(
        results["model"],
        results["norm"],
        results["metrics"],
        data=f"{results['data']['dataset']}/test",
        size={**results["size"], **results["data"]},
    )
    Console().print(render(rows, title=f"{results['model']}, {results['norm']}"))
    folder = Path(trainer.log_dir or ".")
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "test_results.json"
        path.write_text(json.dumps(results, indent=2) + "\n")
        print(f"results: {path}")


def collect(cli: ZooCLI) -> dict[str, Any]:
    """Metrics of the last test with all that a reader needs to repeat it, as plain values."""
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    settings = cli._settings()
    source = settings.get("ckpt_path") or settings.get("weights")
    epochs, steps = _trained(trainer, settings.get("ckpt_path"))
    norm = model.hparams.get("norm") or {}
    return {
        "model": type(model).__name__,
        "norm": norm.get("class_path", "").rsplit(".", 1)[-1],
        "metrics": {
            name.removeprefix("test_"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("test_")
        },
        "data": dict(getattr(data, "facts", {"dataset": type(data).__name__})),
        "preprocessing": dict(getattr(data, "preprocessing", {})),
        "size": {k: v for k, v in model.hparams.items() if k != "norm" and not k.startswith("_")},
        "command": shlex.join(["ln-zoo", *cli.argv]),
        "checkpoint": Path(source).name if source else None,
        "epochs": epochs,
        "steps": steps,
        "seed": settings.get("seed_everything"),
        "precision": str(trainer.precision),
        "processes": trainer.world_size,
        "hardware": hardware(model),
        "date": date.today().isoformat(),
        "versions": {
            "ln_zoo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def hardware(model: LightningModule) -> str:
    """The class of machine: the name of the GPU, or of the processor with its cores.

    Example:
        >>> hardware(LightningModule())
        'CPU, ...'
    """
    if model.device.type == "cuda":
        return f"GPU, {torch.cuda.get_device_name(model.device)}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"CPU, {os.cpu_count()} cores, {name}"


def _trained(trainer: Trainer, ckpt_path: str | None) -> tuple[int | None, int | None]:
    """Epochs and updates behind the weights, where a checkpoint or this process knows them."""
    if ckpt_path and Path(ckpt_path).is_file():
        checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=True)
        return _epochs(checkpoint), checkpoint["global_step"]
    return (trainer.current_epoch, trainer.global_step) if trainer.global_step else (None, None)


def _epochs(checkpoint: dict[str, Any]) -> int:
    """Completed epochs: the stored number is that of the epoch in progress when it was written."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return int(progress["processed"])
