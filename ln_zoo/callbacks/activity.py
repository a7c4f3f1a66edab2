"""Activity of convolutional units by position (Ba et al. 2016, section 6.7)."""

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
    """Measure how often units are on, by position, during ``test`` or ``validate``.

    The paper's explanation for convolutional networks: units near the border are rarely on, so
    their statistics differ from the rest of their layer. Measured over all examples, for each
    position of each `ln_zoo.layers.Conv2d`:

    - ``active``: share of outputs above zero, over examples and channels;
    - ``variance``: variance of the normalised pre-activations over examples, mean over channels;
    - ``rare``: share of channels with an output above zero in less than 5 % of the examples.

    Sums are float64 and reduced over processes. ``activity.csv`` (layer, row, column, ring, active,
    variance, rare; ring 0 is the border) and ``activity.png`` are written at the end, except under
    ``fast_dev_run``. ``ln-zoo compare --activity`` compares runs. Outputs under batch statistics
    are not counted.

    Args:
        folder: folder to write to; default: the log directory.
    """

    #: Name of the files on the command line.
    written_as = "activity"

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.written: Path | None = None
        #: Result of the last run, by name of the layer.
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
        # Unused layers are omitted; all processes use the same layers.
        self.activities = {
            name: sums.activity(partial(trainer.strategy.reduce, reduce_op="sum"))
            for name, sums in self._sums.items()
            if sums.sums is not None
        }
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(self.folder or trainer.log_dir or ".")  # collective
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
    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.examples = 0
        #: Sums of (output > 0), outputs and their squares, (3, C, H, W).
        self.sums: Tensor | None = None

    def add(self, output: Tensor) -> None:
        output = output.detach().double()
        if self.sums is None:
            self.sums = output.new_zeros(3, *output.shape[1:])
        if output.shape[1:] != self.sums.shape[1:]:
            raise ValueError(
                f"ActivityByPosition needs outputs of one size, got {tuple(self.sums.shape[1:])} "
                f"and {tuple(output.shape[1:])} from {self.layer}"
            )
        self.examples += len(output)
        self.sums[0] += (output > 0).sum(0)
        self.sums[1] += output.sum(0)
        self.sums[2] += output.square().sum(0)

    def activity(self, reduce: Callable[[Tensor], Tensor]) -> Activity:
        assert self.sums is not None
        examples = reduce(self.sums.new_tensor(self.examples))
        on, mean, squares = reduce(self.sums) / examples
        variance = (squares - mean.square()).clamp(min=0)  # below 0 by rounding only
        rare = (on < RARELY).double()
        return Activity(*(each.mean(0).cpu() for each in (on, variance, rare)))


def _count(sums: _Sums, layer: Conv2d, args: tuple[Tensor, ...], output: Tensor) -> None:
    if not layer.site.training:
        sums.add(output if output.dim() == 4 else output.unsqueeze(0))
