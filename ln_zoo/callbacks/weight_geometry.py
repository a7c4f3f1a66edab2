"""Implicit decay of the learning rate: norms of weight vectors, and angles of their updates.

Normalised units are invariant to the norm of their weight vectors, so gradients are orthogonal to
them: updates increase the norm, and the larger it is, the less an update turns the vector (paper,
section 5.2.2).
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.callbacks.picture_after_training import PictureAfterTraining
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.plots.weight_geometry import PREFIX, STATISTICS, plot_weight_geometry, read_geometry
from ln_zoo.utils.checks import check_at_least


class WeightGeometry(EveryUpdate, PictureAfterTraining):
    """Log norms of weight vectors and the angles of updates, every n updates.

    The vector of a unit is its row of ``weight`` (dense layers), ``weight_ih_l0`` or
    ``weight_hh_l0`` (recurrent layers; not in ``blocks``), or its kernel (convolutions). For each
    weight, mean and quantiles over units of

    - ``norm``: Euclidean norm of the parameter after the update (of v under weight norm);
    - ``turn``: angle between the vectors before and after the update, degrees;
    - ``effective_lr``: learning rate / norm^2 for SGD, learning rate / norm for optimizers that
      divide by the size of the gradient, with the norm before the update. Turns of normalised units
      are proportional to it, since their gradients are proportional to 1 / norm.

    They are logged as ``weights/NAME/norm_mean``, ``norm_q10``, ``norm_q50``, ``norm_q90``,
    ``turn_mean``, ... at the number of updates. ``weight_geometry.png`` is drawn when training ends
    (`PictureAfterTraining`); ``ln-zoo compare --weight_geometry`` compares runs. A measurement
    copies the weights.

    Args:
        every_n_steps: updates between measurements; the first is after update n.
        power: exponent of the norm in ``effective_lr``; default: 2 for `torch.optim.SGD`, else 1.
    """

    file_name = "weight_geometry.png"
    written_as = "weight geometry"

    def __init__(self, every_n_steps: int = 25, power: float | None = None) -> None:
        super().__init__()
        check_at_least(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.power = power
        #: Weight, learning rate and power before the current update, by name.
        self._before: dict[str, tuple[Tensor, float, float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._before = {}
        if not weight_vectors(pl_module):
            raise ValueError(
                "WeightGeometry needs trainable weights with a row per unit, got "
                f"{type(pl_module).__name__}"
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
    """Trainable weights of a module with a row per unit, by name."""
    # Further weights of a recurrent cell, such as peepholes, have one number per unit; recurrent
    # weights in blocks have a matrix per block.
    others = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in module.named_modules()
        if isinstance(layer, RecurrentLayer | RecurrentCell)
        for name, _ in layer.named_parameters(recurse=False)
        if name.startswith(tuple(f"weight_{own}" for own, _ in layer.cell.weights))
        or (layer.blocks > 1 and name.startswith("weight_hh"))
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
    """Euclidean norms of the rows of a weight (F, \\*), (F,) float64."""
    return torch.linalg.vector_norm(_rows(weight), dim=1)


def turns(before: Tensor, after: Tensor) -> Tensor:
    r"""Angles between the rows of two weights (F, \*), radians, (F,) float64; exact if small."""
    a, b = (nn.functional.normalize(_rows(weight), dim=1) for weight in (before, after))
    # The cosine of a small angle rounds to 1.
    return 2 * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))


def _rows(weight: Tensor) -> Tensor:
    # Some devices lack float64.
    return weight.detach().flatten(1).cpu().double()


def _statistics(numbers: Tensor) -> list[float]:
    quantiles = torch.quantile(numbers, numbers.new_tensor([0.1, 0.5, 0.9]))
    return [float(numbers.mean()), *quantiles.tolist()]
