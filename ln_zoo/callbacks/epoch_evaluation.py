"""Whole-set metrics after each epoch: the curves of the paper's figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader

from ln_zoo.norms import Site


class EpochEvaluation(Callback):
    """Scores the model on whole sets in evaluation mode after each epoch, and logs the curves.

    Logs ``epoch_train_nll``, ``epoch_train_error`` (training NLL over the whole set: what Figure 6
    can only mean by values down to 1e-7), ``epoch_test_*``, and ``epoch_seconds``, the wall time of
    training since the epoch began. Test curves are for figures: nothing selects on them. Where the
    strategy mixes cases (batch norm) the training set is scored a second time with the statistics
    of each batch in place of the running averages, as ``epoch_train_batch_*``; a batch of a single
    case has no such statistics and is left out there. Modes and running averages are put back.

    With several processes each scores its share, and the sums are added up: the numbers are those
    of one process.

    The model must have ``per_case(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader()`` and ``test_dataloader()``, whose loaders repeat no case.

    Args:
        sets: which sets to score: ``"train"``, ``"test"``. Default: both.
        every_n_epochs: score after epochs n, 2n, ...

    Raises:
        ValueError: for an unknown set, or ``every_n_epochs`` below 1.
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
            logged |= _score(trainer, data.train_eval_dataloader(), "epoch_train")
            if any(m.norm.mixes_cases for m in pl_module.modules() if isinstance(m, Site)):
                logged |= _score(trainer, data.train_eval_dataloader(), "epoch_train_batch", True)
        if "test" in self.sets:
            logged |= _score(trainer, data.test_dataloader(), "epoch_test")
        # The scores are those of all processes already, and their mean is the same number; without
        # the exchange Lightning would warn, and with rank 0 alone no callback could monitor them.
        pl_module.log_dict(logged, batch_size=1, sync_dist=True)


@torch.no_grad()
def _score(
    trainer: Trainer, loader: DataLoader, prefix: str, batch_statistics: bool = False
) -> dict[str, float]:
    """Mean of each of the model's metrics over the cases of all processes."""
    module = trainer.lightning_module
    precision = trainer.precision_plugin
    totals: dict[str, Tensor] = {}
    cases = torch.zeros((), dtype=torch.float64, device=module.device)
    with _evaluating(module, batch_statistics):
        for batch in loader:
            # What Lightning's own loops do to a batch.
            batch = trainer.strategy.batch_to_device(precision.convert_input(batch))
            if batch_statistics and extract_batch_size(batch) < 2:
                continue
            with precision.val_step_context():
                scores: dict[str, Tensor] = module.per_case(batch)  # type: ignore[operator]
            for name, values in scores.items():
                totals[name] = totals.get(name, cases.new_zeros(())) + values.double().sum()
            cases += len(values)
    cases = trainer.strategy.reduce(cases, reduce_op="sum")
    return {
        f"{prefix}_{name}": float(trainer.strategy.reduce(total, reduce_op="sum") / cases)
        for name, total in totals.items()
    }


@contextmanager
def _evaluating(module: LightningModule, batch_statistics: bool) -> Iterator[None]:
    """Evaluation mode, with batch statistics at the sites or without; all is put back after."""
    modes = {m: m.training for m in module.modules()}
    sites = [m for m in module.modules() if isinstance(m, Site)]
    if module.trainer.world_size > 1:
        # Running statistics of the last batch are each process's own; the first one's are saved.
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, src=0)
    kept = [{name: b.clone() for name, b in site.named_buffers()} for site in sites]
    module.eval()
    if batch_statistics:
        for site in sites:
            site.train()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        for site, buffers in zip(sites, kept, strict=True):
            for name, before in buffers.items():
                site.get_buffer(name).copy_(before)
