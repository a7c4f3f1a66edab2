"""Whole-set metrics after each epoch: the curves of the paper's figures."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from ln_zoo.norms import Site


class EpochEvaluation(Callback):
    """Scores the model on whole sets in evaluation mode after each epoch, and logs the curves.

    Logs ``epoch_train_nll``, ``epoch_train_error`` (training NLL over the whole set: what Figure 6
    can only mean by values down to 1e-7), ``epoch_test_*``, and ``epoch_seconds``, the wall time of
    training since the epoch began. Test curves are for figures: nothing selects on them. Where the
    strategy mixes cases (batch norm) the training set is scored a second time with the statistics
    of each batch in place of the running averages, as ``epoch_train_batch_*``.

    The model must have ``per_case(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader()`` and ``test_dataloader()``.

    Args:
        sets: which sets to score: ``"train"``, ``"test"``.
        every_n_epochs: score after epochs n, 2n, ...
    """

    def __init__(self, sets: list[str] | None = None, every_n_epochs: int = 1) -> None:
        self.sets = ["train", "test"] if sets is None else sets
        unknown = set(self.sets) - {"train", "test"}
        if unknown:
            raise ValueError(f"sets may hold 'train' and 'test', got {sorted(unknown)}")
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        self.every_n_epochs = every_n_epochs

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        logged = {"epoch_seconds": time.perf_counter() - self._started}
        if "train" in self.sets:
            logged |= _score(pl_module, data.train_eval_dataloader(), "epoch_train")
            if any(m.norm.mixes_cases for m in pl_module.modules() if isinstance(m, Site)):
                logged |= _score(
                    pl_module, data.train_eval_dataloader(), "epoch_train_batch", True
                )
        if "test" in self.sets:
            logged |= _score(pl_module, data.test_dataloader(), "epoch_test")
        pl_module.log_dict(logged, sync_dist=True, batch_size=1)


@torch.no_grad()
def _score(
    module: LightningModule, loader: DataLoader, prefix: str, batch_statistics: bool = False
) -> dict[str, float]:
    """Mean of each of the model's metrics over a loader; modes and buffers are put back."""
    modes = {m: m.training for m in module.modules()}
    sites = [m for m in module.modules() if isinstance(m, Site)]
    kept = [{name: b.clone() for name, b in site.named_buffers()} for site in sites]
    module.eval()
    if batch_statistics:
        for site in sites:
            site.train()
    totals: dict[str, Tensor] = {}
    cases = 0
    for batch in loader:
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        for name, values in module.per_case(batch).items():  # type: ignore[operator]
            totals[name] = totals.get(name, torch.zeros((), dtype=values.dtype)) + values.sum()
        cases += len(values)
    for m, mode in modes.items():
        m.training = mode
    for site, buffers in zip(sites, kept, strict=True):
        for name, before in buffers.items():
            site.get_buffer(name).copy_(before)
    return {f"{prefix}_{name}": float(total / cases) for name, total in totals.items()}
