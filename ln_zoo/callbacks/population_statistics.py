"""Population statistics in place of running averages before a test."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.data import extract_batch_size

from ln_zoo.callbacks.evaluation_loop import batches, data_module, evaluating
from ln_zoo.norms import keeps_statistics, population_statistics
from ln_zoo.utils.checks import check_choice, check_optional


class PopulationStatistics(Callback):
    r"""Estimate batch-norm statistics over the training set before a test.

    Running averages lag behind the weights. Before the test, one pass over the training set with
    frozen weights replaces them (`ln_zoo.norms.population_statistics`; Cooijmans et al. 2017,
    section 3). ``population.ckpt`` in the log directory is the training checkpoint with the new
    statistics. All processes get the same statistics. No-op for a model without running statistics.

    The model must have ``per_example(batch)``; the data module
    ``train_eval_dataloader(batch_size)``, which repeats no example.

    Args:
        method: ``"average"``, the mean of batch means and biased batch variances weighted by batch
            size, or ``"total_variance"``, mean and variance over all examples.
        batch_size: examples per batch; default: the data module's evaluation batches. A batch of
            one example is omitted. Larger batches are closer to the population.
        save: write ``population.ckpt``. It needs weights trained in this run or loaded by
            ``--ckpt_path``.

    Example:
        .. code-block:: bash

            ln-zoo test --ckpt_path last --data MNIST --trainer.callbacks PopulationStatistics \
                --trainer.callbacks.method total_variance
    """

    def __init__(
        self,
        method: Literal["average", "total_variance"] = "average",
        batch_size: int | None = None,
        save: bool = True,
    ) -> None:
        check_choice("method", method, ("average", "total_variance"))
        check_optional(2, batch_size=batch_size)
        self.method = method
        self.batch_size = batch_size
        self.save = save
        #: Whether statistics were estimated in the last test.
        self.estimated = False
        #: Method, examples per batch and total examples of the estimate.
        self.facts: dict[str, Any] = {}
        #: Path of ``population.ckpt``.
        self.written: Path | None = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.estimated, self.facts, self.written = False, {}, None
        if not keeps_statistics(pl_module):
            rank_zero_info("population statistics: the model has no running statistics")
            return
        batch_size, examples = self._estimate(trainer, pl_module)
        self.estimated = True
        self.facts = {"method": self.method, "batch_size": batch_size, "examples": examples}
        if self.save:
            self._write(trainer, pl_module)
        where = "" if self.written is None else f": {self.written}"
        rank_zero_info(
            f"population statistics ({self.method}) of {examples} examples in batches of "
            f"{batch_size}{where}"
        )

    def _estimate(self, trainer: Trainer, module: LightningModule) -> tuple[int, int]:
        """Estimate statistics; return the size of the largest batch, and all examples."""
        data = data_module(trainer, self, "train_eval_dataloader")
        loader = data.train_eval_dataloader(self.batch_size)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            loader = islice(loader, int(trainer.fast_dev_run))  # type: ignore[attr-defined]
        # Counted: many processes get smaller batches than requested.
        largest, examples = torch.zeros(2, dtype=torch.int64, device=module.device)
        with evaluating(module), population_statistics(module, self.method):
            for batch in batches(trainer, loader):
                size = extract_batch_size(batch)
                if size < 2:
                    continue
                with trainer.precision_plugin.test_step_context():
                    module.per_example(batch)  # type: ignore[operator]
                largest.clamp_(min=size)
                examples += size
        reduce = trainer.strategy.reduce
        return int(reduce(largest, reduce_op="max")), int(reduce(examples, reduce_op="sum"))

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        folder = Path(trainer.log_dir or ".")  # collective
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = folder / "population.ckpt"
        if trainer.ckpt_path is not None:
            # Keeps the training state of the checkpoint.
            checkpoint: dict[str, Any] = torch.load(
                trainer.ckpt_path, map_location="cpu", weights_only=True
            )
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
            trainer.strategy.save_checkpoint(checkpoint, path)
            trainer.strategy.barrier("population.ckpt")
        elif trainer.global_step > 0:
            trainer.save_checkpoint(path)
        else:
            rank_zero_info(
                "population statistics: no population.ckpt, since the training is unknown; test a "
                "checkpoint with --ckpt_path"
            )
            return
        self.written = path
