"""What an update takes with layer norm and with the other method of each experiment, on the CPU.

``python -m benchmarks.updates`` runs updates of both methods in turn, on real data: batch, loss,
backward pass, clipping and optimizer. Configurations are those of docs/results/protocol.md, without
scoring; it prints seconds and the ratio to layer norm. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import runner
from ln_zoo.cli.lightning import ZooCLI

_CONFIGS = Path(__file__).parents[1] / "configs"
#: The other method, the configuration and options, by experiment.
EXPERIMENTS = {
    "mnist-4": ("protocol/batch_unbiased", "mlp/paper", "--data.batch_size=4"),
    "convnet": ("none", "conv/mnist"),
    "handwriting": ("none", "handwriting/reduced"),
    "mnist-128": ("batch", "mlp/paper"),
    "draw": ("none", "draw/reduced", "--model.read_stride_bias=-1"),
    "order-embeddings": (
        "none", "order_embedding/flickr8k", "--model.adam_bias_correction=legacy",
    ),
    "skip-thoughts": ("none", "skip_thought/reduced"),
    "attentive-reader": ("batch", "attentive_reader/bbc", "--data.drop_last=true"),
}  # fmt: skip


class BareLoop:
    """Updates of a model without a trainer.

    Args:
        model: a LightningModule that has a trainer.
        data: a LightningDataModule that is set up.
        clip: bound of the gradient's norm; ``None``: the model's own.
    """

    def __init__(self, model: Any, data: Any, clip: float | None = None) -> None:
        self._model, self._data = model, data
        # Without a trainer's loop there is nobody to log to.
        for name in ("log", "log_dict"):
            object.__setattr__(model, name, lambda *_, **__: None)
        model.train()
        self._optimizer = model.configure_optimizers()
        self._clip = clip or model.default_clipping()[0]
        self._batches = iter(data.train_dataloader())

    def update(self) -> None:
        """Train on the next batch; begin anew after the last."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._data.train_dataloader())
            batch = next(self._batches)
        self._optimizer.zero_grad()
        self._model.training_step(batch, 0).backward()
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()


def loop_of(config: str, norm: str, options: Sequence[str] = ()) -> BareLoop:
    """Updates as ``ln-zoo fit`` would do them.

    Args:
        config: a file in ``configs``, without its ending.
        norm: a file in ``configs/norms``, or in ``configs`` if it has a folder.
        options: further arguments of the command.
    """
    norm = norm if "/" in norm else f"norms/{norm}"
    files = [f"--config={_CONFIGS}/{name}.yaml" for name in (config, norm)]
    cli = ZooCLI(["fit", *files, *options])
    cli.datamodule.prepare_data()
    cli.datamodule.setup("fit")
    cli.model.trainer = cli.trainer
    return BareLoop(cli.model, cli.datamodule, cli.trainer.gradient_clip_val)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each experiment."""
    parser = runner.parser("updates", __doc__, rounds=25, seconds=20.0, threads=1)
    parser.add_argument("experiments", nargs="*", metavar="NAME", default=list(EXPERIMENTS))
    given = runner.parse(parser, arguments)
    runner.print_head(["experiment", "method", "seconds of an update", "ratio"])
    table: list[runner.Row] = []
    for name in given.experiments:
        other, config, *options = EXPERIMENTS[name]
        calls = {
            Path(norm).name: loop_of(config, norm, options).update for norm in ("layer", other)
        }
        for row in runner.compare(calls, "layer", {}, given):
            runner.print_row([name, row["contestant"], f"{row['seconds']:.3g}", runner.ratio(row)])
            table.append({"experiment": name} | row)
    runner.write(table, given.csv)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # of the trainers
    main()
