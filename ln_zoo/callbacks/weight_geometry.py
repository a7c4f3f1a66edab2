"""Implicit decay of the learning rate: lengths of weight vectors, and how far updates turn them.

What normalised units compute does not change with the length of their weight vectors, so gradients
have no part along them: updates make vectors longer, and the longer they are, the less the next
update of the same size turns them (paper, section 5.2.2).
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from ln_zoo.callbacks.run_picture import RunPicture
from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.plots.weight_geometry import PREFIX, STATISTICS, plot_weight_geometry, read_geometry


class WeightGeometry(UpdateCallback, RunPicture):
    """Logs how long the weight vectors of each layer are, and how far updates turn them.

    The vector of a unit is its row of the weight: of ``weight`` in dense layers, of a channel's
    kernel in convolutions, of ``weight_ih_l0`` and ``weight_hh_l0`` in recurrent ones. Every n
    updates, for each weight with such rows, mean and quantiles over them of

    - ``norm``: the Euclidean length after the update, of the parameter itself: under weight norm
      that of v, which the layer's scale does not depend on;
    - ``turn``: the angle by which this one update turned the vector, in degrees;
    - ``effective_lr``: learning rate / length^2 for SGD, learning rate / length for optimizers that
      divide by the size of the gradient (Adam and all others): what a turn is proportional to for
      units whose output does not depend on the length, since their gradients go with 1 / length.
      The length is that before the update.

    They are logged as ``weights/NAME/norm_mean``, ``norm_q10``, ``norm_q50``, ``norm_q90``,
    ``turn_mean`` and so on, straight to the run's loggers, at the number of updates done. When
    training ends, also by an error or an interruption, ``weight_geometry.png`` is drawn beside the
    file of the `CSVLogger`, if there is one; ``ln-zoo compare --weight_geometry`` shows those of
    several runs beside each other. Between these updates it costs nothing; at one of them a copy of
    the weights.

    Args:
        every_n_steps: updates between two looks; the first is at the n-th.
        power: of the length in ``effective_lr``; default: 2 for `torch.optim.SGD`, else 1.

    Raises:
        ValueError: for an n below 1; when training begins, for a model without such weights.
    """

    file_name = "weight_geometry.png"
    written_as = "weight geometry"

    def __init__(self, every_n_steps: int = 25, power: float | None = None) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.power = power
        #: Of the update under way, by name: the weight before it, and what divides its lengths.
        self._before: dict[str, tuple[Tensor, float, float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._before = {}
        if not weight_vectors(pl_module):
            raise ValueError(
                "WeightGeometry needs trained weights with a row for each unit, and "
                f"{type(pl_module).__name__} has none"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        power = self.power
        if power is None:
            power = 2.0 if isinstance(optimizer, torch.optim.SGD) else 1.0
        rates = {
            id(parameter): float(group["lr"])
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, weight in weight_vectors(pl_module).items():
            if id(weight) in rates:
                self._before[name] = (weight.detach().clone(), rates[id(weight)], power)

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        if not self._before:
            return
        weights = weight_vectors(trainer.lightning_module)
        values: dict[str, float] = {}
        for name, (before, rate, power) in self._before.items():
            found = {
                "norm": lengths(weights[name]),
                "turn": turns(before, weights[name]).rad2deg(),
                "effective_lr": rate / lengths(before).pow(power),
            }
            for quantity, numbers in found.items():
                for statistic, value in zip(STATISTICS, _statistics(numbers), strict=True):
                    values[f"{PREFIX}{name}/{quantity}_{statistic}"] = value
        self._before = {}
        for logger in trainer.loggers:
            logger.log_metrics({**values, "epoch": trainer.current_epoch}, trainer.global_step)

    def draw(self, metrics: Path, picture: Path) -> bool:
        geometry = read_geometry(metrics)
        if geometry:
            plot_weight_geometry({"": geometry}, picture)
        return bool(geometry)


def weight_vectors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained weights of a module that have a row for each unit, by name.

    Example:
        >>> from ln_zoo.layers import GRU
        >>> list(weight_vectors(GRU(3, 4)))
        ['weight_ih_l0', 'weight_hh_l0']
    """
    # A recurrent cell's further weights, such as peepholes, have a number for each unit.
    others = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in module.named_modules()
        if isinstance(layer, RecurrentLayer | RecurrentCell)
        for name, _ in layer.named_parameters(recurse=False)
        if name.startswith(tuple(f"weight_{own}" for own, _ in layer.cell.weights))
    }
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[2].startswith("weight")
        and name not in others
        and parameter.dim() >= 2
        and parameter.requires_grad
    }


def lengths(weight: Tensor) -> Tensor:
    """Euclidean lengths of the rows of a weight (F, \\*), (F,) float64."""
    return torch.linalg.vector_norm(_rows(weight), dim=1)


def turns(before: Tensor, after: Tensor) -> Tensor:
    """Angles between the rows of two weights (F, \\*), in radians, (F,) float64; small ones too.

    Args:
        before: a weight.
        after: another of its shape.

    Example:
        >>> turns(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 3e-9]]))
        tensor([1.0000e-09], dtype=torch.float64)
    """
    a, b = (nn.functional.normalize(_rows(weight), dim=1) for weight in (before, after))
    # The cosine of a small angle is 1 to all digits.
    return 2 * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))


def _rows(weight: Tensor) -> Tensor:
    # On the CPU: not every device has float64.
    return weight.detach().flatten(1).cpu().double()


def _statistics(numbers: Tensor) -> list[float]:
    """Those of `STATISTICS`."""
    quantiles = torch.quantile(numbers, numbers.new_tensor([0.1, 0.5, 0.9]))
    return [float(numbers.mean()), *quantiles.tolist()]
