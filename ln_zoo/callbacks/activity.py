"""Where in the picture units are on: the paper's explanation for convolutional networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ln_zoo.layers import Conv2d
from ln_zoo.plots.activity import RARELY, Activity, plot_activity, write_activity


class ActivityByPosition(Callback):
    """Measures by position how often units are on, while ``test`` or ``validate`` runs.

    The paper explains (section 6.7) why layer normalisation gains less in convolutional networks:
    units whose receptive fields lie near the border of the image are rarely on, so their statistics
    differ from those of the rest of their layer. For every `ln_zoo.layers.Conv2d`, and each
    position of its output, this takes over all examples

    - ``active``: the share of outputs above zero, over examples and channels;
    - ``variance``: the variance over examples of the normalised pre-activations, mean over
      channels. The bias, which the output includes, does not matter to it;
    - ``rare``: the share of channels that are rarely on there, in less than 5 % of the examples.

    Sums are float64, those of several processes are added up. At the end ``activity.csv`` (layer,
    row, column, ring, active, variance, rare; ring 0 is the border) and ``activity.png`` are
    written to the run's log directory; a dry run (``fast_dev_run``) writes nothing. ``ln-zoo
    compare --activity`` shows those of several runs next to each other.

    Outputs under batch statistics, which validation of batch norm takes as well, are not counted.

    Args:
        folder: where to write; default: the log directory.

    Raises:
        ValueError: for a model without such a layer; if the size of a layer's output changes.
    """

    #: What the command line calls it.
    written_as = "activity"

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.written: Path | None = None
        #: Of the last run, by the layer's name in the model.
        self.activities: dict[str, Activity] = {}
        self._sums: dict[str, _Sums] = {}
        self._hooks: list[Any] = []

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # not within training
            self._start(pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._end(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._remove_hooks()

    def _start(self, module: LightningModule) -> None:
        layers = {name: m for name, m in module.named_modules() if isinstance(m, Conv2d)}
        if not layers:
            raise ValueError(
                "ActivityByPosition needs layers of ln_zoo.layers.Conv2d, and "
                f"{type(module).__name__} has none"
            )
        self._sums = {name: _Sums(name) for name in layers}
        for name, layer in layers.items():
            self._hooks.append(layer.register_forward_hook(partial(_count, self._sums[name])))

    def _end(self, trainer: Trainer) -> None:
        self._remove_hooks()
        # A layer that no example went through is left out; all processes run the same layers.
        self.activities = {
            name: sums.activity(partial(trainer.strategy.reduce, reduce_op="sum"))
            for name, sums in self._sums.items()
            if sums.sums is not None
        }
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(self.folder or trainer.log_dir or ".")  # asks every process
        if trainer.is_global_zero and self.activities:
            folder.mkdir(parents=True, exist_ok=True)
            write_activity(self.activities, folder / "activity.csv")
            self.written = folder / "activity.png"
            plot_activity(self.activities, self.written)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Sums:
    """Sums over the examples that went through one layer."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.examples = 0
        #: Of being on, of outputs and of their squares, (3, C, H, W).
        self.sums: Tensor | None = None

    def add(self, output: Tensor) -> None:
        """Outputs (N, C, H, W)."""
        output = output.detach().double()
        if self.sums is None:
            self.sums = output.new_zeros(3, *output.shape[1:])
        if output.shape[1:] != self.sums.shape[1:]:
            raise ValueError(
                f"ActivityByPosition needs outputs of one size, and {self.layer} gave "
                f"{tuple(self.sums.shape[1:])} and {tuple(output.shape[1:])}"
            )
        self.examples += len(output)
        self.sums[0] += (output > 0).sum(0)
        self.sums[1] += output.sum(0)
        self.sums[2] += output.square().sum(0)

    def activity(self, reduce: Callable[[Tensor], Tensor]) -> Activity:
        """What they come to, those of all processes together."""
        assert self.sums is not None
        examples = reduce(self.sums.new_tensor(self.examples))
        on, mean, squares = reduce(self.sums) / examples
        variance = (squares - mean.square()).clamp(min=0)  # below 0 by rounding only
        rare = (on < RARELY).double()
        return Activity(*(each.mean(0).cpu() for each in (on, variance, rare)))


def _count(sums: _Sums, layer: Conv2d, args: tuple[Tensor, ...], output: Tensor) -> None:
    """A forward hook."""
    if not layer.site.training:
        sums.add(output if output.dim() == 4 else output.unsqueeze(0))
