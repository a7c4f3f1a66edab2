"""Tables of measured and reported scores, and ``test_results.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ln_zoo.files import relative
from ln_zoo.zoo import reported
from ln_zoo.zoo.measured import Evaluated, card_scores, collect


def report(run: Evaluated) -> None:
    """Prints the table of a test and writes ``test_results.json``."""
    trainer = run.trainer
    folder = Path(trainer.log_dir or ".")  # a collective call
    if not trainer.is_global_zero:
        return
    results = collect(run)
    _print_table(results, "test", *card_scores(run, results))
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "test_results.json"
        path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"results: {relative(path)}")


def report_validation(run: Evaluated) -> None:
    """Prints the table of a validation."""
    if run.trainer.is_global_zero:
        _print_table(collect(run, "val"), "validation")


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
