"""Population statistics of the training set, in place of running averages, before the test."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.data import extract_batch_size

from ln_zoo.callbacks.whole_set import batches, data_module, evaluating
from ln_zoo.norms import keeps_statistics, population_statistics


class PopulationStatistics(Callback):
    """Takes a batch-normalised model's statistics anew over the training set before it is tested.

    Running averages follow the last few training batches, and weights that have moved since. For
    final numbers the model goes once through the whole training set with frozen weights, and tests
    with the statistics found there (`ln_zoo.norms.population_statistics`; Cooijmans et al. 2017,
    section 3). Nothing but those buffers changes, random numbers included. The model with its new
    statistics is written as ``population.ckpt`` beside the logs: a checkpoint like that of the
    training, with its epochs and updates, which gives the same metrics when it is tested again.
    With several processes each takes its share of the batches, and all get the same statistics.

    A model whose norm keeps no such statistics is tested as it is.

    The model must have ``per_example(batch)``; the data module must have
    ``train_eval_dataloader(batch_size)``, whose loader repeats no example.

    Args:
        method: ``"average"``, the average of batch means and biased batch variances, each weighted
            by its examples, so that a small last batch counts for what it is; or
            ``"total_variance"``, mean and variance of all examples together.
        batch_size: examples per batch; a last batch of one example is left out. Default: the data
            module's evaluation batches. Averages of large batches come closer to the population.
        save: whether to write ``population.ckpt``. It is not written where nothing is known of the
            training: for weights that were neither trained just now nor read by ``--ckpt_path``.

    Raises:
        ValueError: for an unknown method, a batch size below 2; before the test, without a data
            module of that kind.

    Example:
        .. code-block:: bash

            ln-zoo test --ckpt_path last --data MNIST --trainer.callbacks PopulationStatistics \\
                --trainer.callbacks.method total_variance
    """

    def __init__(
        self,
        method: Literal["average", "total_variance"] = "average",
        batch_size: int | None = None,
        save: bool = True,
    ) -> None:
        if method not in ("average", "total_variance"):
            raise ValueError(f"method must be 'average' or 'total_variance', got {method!r}")
        if batch_size is not None and batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2, got {batch_size}: one example is not a batch"
            )
        self.method = method
        self.batch_size = batch_size
        self.save = save
        #: Whether the model that was tested last has statistics of its population.
        self.estimated = False
        #: If so, how they were taken: the method, the examples per batch and all examples.
        self.facts: dict[str, Any] = {}
        #: Where it was written.
        self.written: Path | None = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.estimated, self.facts, self.written = False, {}, None
        if not keeps_statistics(pl_module):
            rank_zero_info("population statistics: this model keeps none, nothing was estimated")
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
        """Puts new statistics on the model; the examples of the largest batch, and of all."""
        data = data_module(trainer, self, "train_eval_dataloader")
        loader = data.train_eval_dataloader(self.batch_size)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            loader = islice(loader, int(trainer.fast_dev_run))  # type: ignore[attr-defined]
        # Counted: processes that are many for the set get smaller batches than were asked for.
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
        folder = Path(trainer.log_dir or ".")  # asks every process
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = folder / "population.ckpt"
        if trainer.ckpt_path is not None:
            # All that the checkpoint says of its training holds for this one too.
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
                "population statistics: no population.ckpt is written, since nothing is known of "
                "the training; test the checkpoint itself, with --ckpt_path"
            )
            return
        self.written = path
