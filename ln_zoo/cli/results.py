"""What ``test`` and ``validate`` print, and ``test`` writes: measured beside reported numbers."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Mapping
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule
from rich.console import Console

from ln_zoo._version import __version__
from ln_zoo.callbacks import LastCheckpoint, PopulationStatistics
from ln_zoo.cli import optimizers, outputs, stored
from ln_zoo.training_runs import facts_of
from ln_zoo.zoo import reported
from ln_zoo.zoo.loading import find_card

if TYPE_CHECKING:
    from ln_zoo.cli.lightning import ZooCLI


def report(cli: ZooCLI) -> None:
    """Prints the table of the test that has just run, and writes ``test_results.json``."""
    trainer = cli.trainer
    folder = Path(trainer.log_dir or ".")  # asks every process
    if not trainer.is_global_zero:
        return
    results = collect(cli)
    _print_table(results, "test", *_on_card(cli, results))
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "test_results.json"
        path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"results: {outputs.relative(path)}")


def report_validation(cli: ZooCLI) -> None:
    """Prints the table of the validation that has just run."""
    if cli.trainer.is_global_zero:
        _print_table(collect(cli, "val"), "validation")


def _print_table(
    results: dict[str, Any], split: str, card: dict[str, float] | None = None, note: str = ""
) -> None:
    part = results["part"]
    rows = reported.comparison(
        results["model"],
        results["norm"],
        results["metrics"],
        data=reported.measured_on(results["data"], split),
        size=reported.run_size(results["size"], results["data"], results["training_runs"]),
        obstacles=[f"a part of the {split} set here"] if part else [],
    )
    title = f"{results['model']}, {results['norm']}"
    if part:
        title += (
            f", on a part of the {split} set: {part['batches']} of {part['of_batches']} batches"
        )
    if part and part["examples"] is not None:
        title += f", {part['examples']:,} examples"
    Console().print(reported.render(rows, title=title, card=card, note=note))


def _on_card(cli: ZooCLI, results: Mapping[str, Any]) -> tuple[dict[str, float] | None, str]:
    """What the card of the weights under test says of the same data, in the unit of tables.

    Second comes a note: in what the inputs of the card's test differ, if they do.
    """
    weights, data = cli._settings().get("weights"), results["data"]
    if cli.subcommand != "test" or not weights or weights.endswith(".ckpt"):
        return None, ""
    card = find_card(weights)
    here, there = results["preprocessing"], card.preprocessing
    other = [
        f"{key} {here[key]} here, {there[key]} there"
        for key in there.keys() & here.keys()
        # Lists are statistics of training data, which may differ by rounding alone.
        if not isinstance(there[key], list) and there[key] != here[key]
    ]
    if other:
        return None, f"The card's numbers are for other inputs: {'; '.join(sorted(other))}."
    stated = {}
    for metric in card.metrics:
        measured = reported.measured_on(data, metric=metric["name"])
        if f"{metric['dataset']}/{metric['split']}" == measured:
            known = reported.metric_unit(metric["name"])
            stated[metric["name"]] = metric["value"] * (known.scale if known else 1.0)
    return stated, ""


def collect(cli: ZooCLI, stage: str = "test") -> dict[str, Any]:
    """Metrics of the last evaluation with all that a reader needs to repeat it, as plain values.

    Args:
        cli: which has run it.
        stage: ``"test"`` or ``"val"``.
    """
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    settings = cli._settings()
    path = _tested_file(cli)
    population = _population(cli)
    runs = model.training_runs
    optimization = stored.read_checkpoint(str(path)).get(optimizers.KEY) if path else None
    norm = model.hparams.get("norm") or {}
    facts = facts_of(data)
    part = _part(cli, stage)
    if part and part["examples"] is not None:
        facts[f"{stage}_size"] = part["examples"]
    return {
        "model": type(model).__name__,
        "norm": norm.get("class_path", "").rsplit(".", 1)[-1],
        "metrics": {
            name.removeprefix(f"{stage}_"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith(f"{stage}_")
        },
        "data": facts,
        "part": part,
        "preprocessing": dict(getattr(data, "preprocessing", {})),
        "size": _size(model),
        "command": shlex.join(["ln-zoo", *cli.argv]),
        "weights": settings.get("weights"),
        "population_statistics": population.facts if population else None,
        "checkpoint": path.name if path else None,
        "checkpoint_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path else None,
        "epochs": runs[-1].get("epochs") if runs else None,
        "steps": runs[-1].get("steps") if runs else None,
        "training_runs": [dict(run) for run in runs],
        "optimization": optimization,
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


def _size(model: LightningModule) -> dict[str, Any]:
    """The model's arguments, the number of words in place of a vocabulary."""
    hparams = {k: v for k, v in model.hparams.items() if k != "norm" and not k.startswith("_")}
    if hparams.pop("vocabulary", None) is not None:
        hparams["vocab_size"] = model.vocabulary.size
    return hparams


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


def _part(cli: ZooCLI, stage: str) -> dict[str, int | None] | None:
    """How much of a set was evaluated, where that was not the whole; None where it was."""
    trainer = cli.trainer
    loaders: Any = trainer.test_dataloaders if stage == "test" else trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    done = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
    lengths = [n for loader in loaders if (n := sized_len(loader)) is not None]
    if len(lengths) < len(loaders) or sum(done) >= sum(lengths):
        return None
    # Of several processes each has batches of its own.
    examples = sum(map(_examples, loaders, done)) if trainer.world_size == 1 else None
    return {"batches": int(sum(done)), "of_batches": sum(lengths), "examples": examples}


def _examples(loader: Any, batches: float) -> int:
    """How many examples the first batches of a loader have."""
    # Our own take whole batches of their samplers.
    sampler = loader.batch_sampler or loader.sampler
    return sum(len(batch) for batch in islice(sampler, int(batches)))


def _population(cli: ZooCLI) -> PopulationStatistics | None:
    """What put statistics of the population on the model that was tested, if anything did."""
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PopulationStatistics) and callback.estimated:
            return callback
    return None


def _tested_file(cli: ZooCLI) -> Path | None:
    """The checkpoint file that holds the weights which were tested, if there is one."""
    settings = cli._settings()
    if population := _population(cli):
        return population.written
    if cli.subcommand != "fit":
        source = settings.get("ckpt_path") or settings.get("weights")
        return Path(source) if source and Path(source).is_file() else None
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LastCheckpoint) and callback.best_model_path:
            path = Path(callback.best_model_path)
            steps = stored.read_checkpoint(str(path)).get("global_step")
            return path if steps == cli.trainer.global_step else None
    return None
