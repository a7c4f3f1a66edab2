"""Scores of an evaluation: the table of the terminal, and ``test_results.json``.

The file holds the metrics and how to reproduce them; `ln_zoo.zoo.publishing` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule, Trainer
from rich.console import Console

from ln_zoo._version import __version__
from ln_zoo.callbacks import LastCheckpoint, PopulationStatistics
from ln_zoo.cli.optimizers import OPTIMIZATION
from ln_zoo.cli.plain_modules import norm_of
from ln_zoo.utils.files import relative
from ln_zoo.utils.training_runs import dataset_metadata
from ln_zoo.zoo import reported
from ln_zoo.zoo.reading import checkpoint_in, find_card, read_checkpoint


class Evaluated(NamedTuple):
    """A finished evaluation: trainer, model, data, settings, and command line."""

    trainer: Trainer
    model: Any
    data: LightningDataModule
    settings: Mapping[str, Any]
    argv: list[str]
    subcommand: str


def report(run: Evaluated) -> None:
    """Prints the table of a test and writes ``test_results.json``."""
    trainer = run.trainer
    folder = Path(trainer.log_dir or ".")  # a collective call
    if not trainer.is_global_zero:
        return
    results = _collect(run, "test")
    _print_table(results, "test", *_card_scores(run, results))
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "test_results.json"
        path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"results: {relative(path)}")


def report_validation(run: Evaluated) -> None:
    """Prints the table of a validation."""
    if run.trainer.is_global_zero:
        _print_table(_collect(run, "val"), "validation")


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
        batches = f"{part['batches']} of {part['of_batches']} batches"
        title += f", on a part of the {split} set: {batches}"
        title += "" if part["examples"] is None else f", {part['examples']:,} examples"
    Console().print(reported.render(rows, title=title, card=card, note=note))


def _collect(run: Evaluated, stage: str) -> dict[str, Any]:
    """Metrics of an evaluation and how to reproduce it, as plain values."""
    trainer, model, data, settings = run.trainer, run.model, run.data, run.settings
    path, population, runs = (
        _tested_file(run),
        _population(run),
        getattr(model, "training_runs", ()),
    )
    norm = norm_of(model, trainer.callbacks)  # type: ignore[attr-defined]
    facts = dataset_metadata(data)
    part = _part(run, stage)
    if part and part["examples"] is not None:
        facts[f"{stage}_size"] = part["examples"]
    return {
        "model": type(model).__name__,
        "norm": norm.get("class_path", "").rsplit(".", 1)[-1],
        "metrics": _metrics(trainer, stage),
        "data": facts,
        "part": part,
        "preprocessing": dict(getattr(data, "preprocessing", {})),
        "size": reported.model_size(model),
        "command": shlex.join(["ln-zoo", *run.argv]),
        "weights": settings.get("weights"),
        "population_statistics": population.facts if population else None,
        "checkpoint": path.name if path else None,
        "checkpoint_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path else None,
        "epochs": runs[-1].get("epochs") if runs else None,
        "steps": runs[-1].get("steps") if runs else None,
        "training_runs": [dict(run) for run in runs],
        "optimization": read_checkpoint(str(path)).get(OPTIMIZATION) if path else None,
        "seed": settings.get("seed_everything"),
        "precision": str(trainer.precision),
        "processes": trainer.world_size,
        # After a run Lightning has moved the model to the CPU.
        "hardware": _hardware(trainer.strategy.root_device),
        "date": date.today().isoformat(),
        "versions": {
            "ln_zoo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _metrics(trainer: Trainer, stage: str) -> dict[str, float]:
    """Logged values without the stage's prefix, ``test_`` or ``test/``; all without any."""
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    prefix = f"{stage}_", f"{stage}/"
    of_stage = {k[len(stage) + 1 :]: v for k, v in logged.items() if k.startswith(prefix)}
    return of_stage or logged


def _card_scores(run: Evaluated, results: Mapping[str, Any]) -> tuple[dict[str, float] | None, str]:
    """Scores of the tested card on the same data, in the units of tables; None if it has none.

    The second value is a note if the card was tested with other preprocessing.
    """
    weights = run.settings.get("weights")
    if run.subcommand != "test" or not weights or checkpoint_in(weights):
        return None, ""
    card = find_card(weights)
    here, there = results["preprocessing"], card.preprocessing
    other = [
        f"{key} {here[key]} here, {there[key]} there"
        for key in there.keys() & here.keys()
        # Lists are statistics of training data, which may differ by rounding.
        if not isinstance(there[key], list) and there[key] != here[key]
    ]
    if other:
        return None, f"The card's numbers are for other inputs: {'; '.join(sorted(other))}."
    stated = {}
    for metric in card.metrics:
        measured = reported.measured_on(results["data"], metric=metric["name"])
        if f"{metric['dataset']}/{metric['split']}" == measured:
            scale = reported.metric_unit(metric["name"]).scale
            stated[metric["name"]] = metric["value"] * scale
    return stated, ""


def _hardware(device: torch.device) -> str:
    """The hardware class: GPU name, or processor name and core count."""
    if device.type == "cuda":
        return f"GPU, {torch.cuda.get_device_name(device)}"
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)$", info.read_text(), re.M) if info.is_file() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"CPU, {os.cpu_count()} cores, {name}"


def _part(run: Evaluated, stage: str) -> dict[str, int | None] | None:
    """How much of a set was evaluated; None for the entire set."""
    trainer = run.trainer
    loaders: Any = trainer.test_dataloaders if stage == "test" else trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    done = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
    lengths = [n for loader in loaders if (n := sized_len(loader)) is not None]
    if len(lengths) < len(loaders) or sum(done) >= sum(lengths):
        return None
    # Each of several processes has its own batches.
    examples = sum(map(_examples, loaders, done)) if trainer.world_size == 1 else None
    return {"batches": int(sum(done)), "of_batches": sum(lengths), "examples": examples}


def _examples(loader: Any, batches: float) -> int:
    """Number of examples in the first batches of a loader."""
    # Our loaders use batch samplers.
    sampler = loader.batch_sampler or loader.sampler
    return sum(len(batch) for batch in islice(sampler, int(batches)))


def _population(run: Evaluated) -> PopulationStatistics | None:
    """The callback that set population statistics on the tested model, or None."""
    callbacks = run.trainer.callbacks  # type: ignore[attr-defined]
    ours = (each for each in callbacks if isinstance(each, PopulationStatistics))
    return next((each for each in ours if each.estimated), None)


def _tested_file(run: Evaluated) -> Path | None:
    """The checkpoint of the tested weights, or None."""
    settings = run.settings
    if population := _population(run):
        return population.written
    if run.subcommand != "fit":
        start = checkpoint_in(settings.get("ckpt_path") or settings.get("weights") or "")
        return Path(start) if start and Path(start).is_file() else None
    for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LastCheckpoint) and callback.best_model_path:
            path = Path(callback.best_model_path)
            steps = read_checkpoint(str(path)).get("global_step")
            return path if steps == run.trainer.global_step else None
    return None
