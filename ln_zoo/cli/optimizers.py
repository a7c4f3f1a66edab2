"""``--optimizer`` and ``--lr_scheduler``: another optimizer or a schedule than the model's own.

What a run was trained with is stored in its checkpoints, so that a resumed run goes on with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LRSchedulerTypeTuple,
    ReduceLROnPlateau,
    instantiate_class,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import SGD, Adam, Optimizer

from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.notes import note
from ln_zoo.models.base import ZooModule, fused_on_cpu
from ln_zoo.zoo import trust
from ln_zoo.zoo.measured import OPTIMIZATION

#: The options, and the keys under which checkpoints hold them.
OPTIONS = ("optimizer", "lr_scheduler", "lr_scheduler_config")


@dataclass
class SchedulerConfig:
    """When Lightning steps a schedule of the learning rate.

    Args:
        interval: ``step``: after updates; ``epoch``: after epochs.
        frequency: after how many of them.
    """

    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1


def add_arguments(parser: LightningArgumentParser) -> None:
    """Adds the options to the parser of a subcommand."""
    parser.add_optimizer_args((Optimizer,))
    parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
    parser.add_class_arguments(SchedulerConfig, "lr_scheduler_config")


def use_rate_of_model(settings: Namespace, given: Arguments) -> bool:
    """Gives the optimizer the model's learning rate, unless it was given one of its own.

    Args:
        settings: of the subcommand, changed in place.
        given: the user's options.

    Returns:
        Whether the rate is the model's.
    """
    if settings.optimizer is None:
        return False
    rate = (settings.model.get("init_args") or Namespace()).get("lr")
    init_args = settings.optimizer.init_args
    if rate is None or "lr" not in init_args:
        return False
    if given.has("optimizer.lr"):
        if init_args.lr != rate:
            note(f"note: model.lr = {rate} is ignored: optimizer.lr is {init_args.lr}")
        return False
    init_args.lr = rate
    return True


def of_checkpoint(checkpoint: Mapping[str, Any], path: str, given: Arguments) -> dict[str, Any]:
    """The options that a checkpoint was trained with; all None if with the model's own optimizer.

    Args:
        checkpoint: its content.
        path: where it lies, for messages.
        given: the user's options: they name the classes that may be imported.

    Raises:
        ValueError: if it names a class which is neither torch's nor ours nor named by the user.
    """
    found = checkpoint.get(OPTIMIZATION) or {}
    for option in OPTIONS[:2]:
        class_path = (found.get(option) or {}).get("class_path")
        if class_path and class_path not in given.named() and not trust.is_loaded(class_path):
            raise ValueError(
                f"{path} asks for {class_path}, which is not one of ln_zoo's classes, and modules "
                f"named in a file are not imported: if you trust the file, give --{option} "
                f"{class_path}"
            )
    return {option: found.get(option) for option in OPTIONS}


def note_ignored(mine: Namespace, used: Namespace, given: Arguments, path: str) -> None:
    """Notes which of the user's options lose against those of the checkpoint.

    Args:
        mine: the settings as the user gave them.
        used: as the checkpoint has them.
        given: the user's options.
        path: of the checkpoint.
    """
    asked = {each.name.partition(".")[0] for each in given.options}
    for option in OPTIONS:
        if option in asked and _plain(mine[option]) != _plain(used[option]):
            theirs = used[option] and used[option].get("class_path", "another one")
            note(
                f"note: --{option} is ignored: {path} was trained with "
                f"{theirs or 'the default of the model'} (to start a new run from its weights, "
                "give --weights in place of --ckpt_path)"
            )


def install(model: ZooModule, settings: Namespace, rate_of_model: bool) -> Callback | None:
    """Puts the options in place of the model's ``configure_optimizers``.

    Args:
        model: any model, its own ``configure_optimizers`` included.
        settings: of the subcommand.
        rate_of_model: whether the optimizer takes ``model.lr`` as it is when training begins.

    Returns:
        A callback that stores the options in checkpoints; None if there are none.
    """
    if settings.optimizer is None and settings.lr_scheduler is None:
        return None
    own = model.configure_optimizers

    def configure_optimizers() -> OptimizerLRScheduler:
        if settings.optimizer is None:
            optimizer = _single(model, own())
        else:
            if rate_of_model:
                settings.optimizer.init_args.lr = model.lr
            optimizer = _optimizer(model, settings.optimizer.as_dict())
        if settings.lr_scheduler is None:
            return optimizer
        scheduler = instantiate_class(optimizer, settings.lr_scheduler.as_dict())
        config = {"scheduler": scheduler, **settings.lr_scheduler_config.as_dict()}
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    # torch's modules take functions for attributes, its stubs do not.
    model.__dict__["configure_optimizers"] = configure_optimizers
    return _Stored(settings)


class _Stored(Callback):
    """Stores the options in checkpoints."""

    def __init__(self, settings: Namespace) -> None:
        self.settings = settings

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[OPTIMIZATION] = {option: _plain(self.settings[option]) for option in OPTIONS}


def _optimizer(model: ZooModule, config: dict[str, Any]) -> Optimizer:
    """The optimizer of a configuration, in its fused form on a CPU as the models' own are."""
    # What is frozen now may join later, in a group of its own.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Optimizer = instantiate_class(trained, config)
    choices = ("fused", "foreach", "differentiable")
    if isinstance(optimizer, (Adam, SGD)) and not any(config["init_args"].get(c) for c in choices):
        arguments = config["init_args"] | fused_on_cpu(model)
        optimizer = instantiate_class(trained, config | {"init_args": arguments})
    return optimizer


def _single(model: ZooModule, configured: OptimizerLRScheduler) -> Optimizer:
    if not isinstance(configured, Optimizer):
        raise MisconfigurationException(
            f"{type(model).__name__} has a schedule of its own, or several optimizers: give "
            "--optimizer together with --lr_scheduler to replace them"
        )
    return configured


def _plain(value: Any) -> Any:
    """A configuration as plain values; functions by the path from which they are imported."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value
