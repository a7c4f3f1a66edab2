"""Evaluation metrics of models that are ratios of sums, such as nats per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning.pytorch import LightningModule
from torch import Tensor

from ln_zoo.metrics import Ratio


def add_ratios(module: LightningModule, stage: str, names: Iterable[str]) -> None:
    """Add a `Ratio` ``{stage}_{name}`` for each name."""
    for name in names:
        setattr(module, f"{stage}_{name}", Ratio())


def log_ratios(
    module: LightningModule, stage: str, sums: Mapping[str, tuple[Tensor, Tensor]], examples: int
) -> None:
    """Update and log ``{stage}_{name}`` by numerators and denominators of a batch.

    The first name is shown in the progress bar of a validation.
    """
    shown = next(iter(sums)) if stage == "val" else None
    for name, terms in sums.items():
        metric = getattr(module, f"{stage}_{name}")
        metric.update(*terms)
        module.log(f"{stage}_{name}", metric, prog_bar=name == shown, batch_size=examples)
