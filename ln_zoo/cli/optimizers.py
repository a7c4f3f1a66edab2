"""``--optimizer`` and ``--lr_scheduler``: replace the model's own.

Checkpoints store both, so that a resumed run keeps them.
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
from ln_zoo.cli.notes import print_note
from ln_zoo.models.base import ZooModule, fused_on_cpu
from ln_zoo.zoo import trust

#: Key under which checkpoints hold the optimizer and schedule that replaced the model's own.
OPTIMIZATION = "optimization"
#: The options, also the keys in checkpoints.
OPTIONS = ("optimizer", "lr_scheduler", "lr_scheduler_config")


@dataclass
class SchedulerConfig:
    """When Lightning steps a schedule of the learning rate.

    Args:
        interval: ``step``: after updates; ``epoch``: after epochs.
        frequency: number of updates or epochs between two steps.
    """

    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1


def add_arguments(parser: LightningArgumentParser) -> None:
    """Adds the options to the parser of a subcommand."""
    parser.add_optimizer_args((Optimizer,))
    parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
    parser.add_class_arguments(SchedulerConfig, "lr_scheduler_config")


def use_rate_of_model(settings: Namespace, given: Arguments) -> bool:
    """Set the optimizer's learning rate to the model's, unless the user gave one.

    Changes the subcommand's ``settings``, and returns whether the model's rate is used.
    """
    if settings.optimizer is None:
        return False
    rate = (settings.model.get("init_args") or Namespace()).get("lr")
    init_args = settings.optimizer.init_args
    if rate is None or "lr" not in init_args:
        return False
    if given.has("optimizer.lr"):
        if init_args.lr != rate:
            print_note(f"model.lr = {rate} is ignored: optimizer.lr is {init_args.lr}")
        return False
    init_args.lr = rate
    return True


def of_checkpoint(checkpoint: Mapping[str, Any], path: str, given: Arguments) -> dict[str, Any]:
    """The options that a checkpoint was trained with; None for the model's own optimizer.

    Raises:
        ValueError: if a class is neither loaded nor named by the user in ``given``.
    """
    found = checkpoint.get(OPTIMIZATION) or {}
    for option in OPTIONS[:2]:
        class_path = (found.get(option) or {}).get("class_path")
        if class_path and class_path not in given.named() and not trust.is_loaded(class_path):
            raise ValueError(
                f"{path} asks for {class_path}, and modules named in a file are not imported: if "
                f"you trust the file, give --{option} {class_path}"
            )
    return {option: found.get(option) for option in OPTIONS}


def note_ignored(asked: Namespace, used: Namespace, given: Arguments, path: str) -> None:
    """Notes the user's options that the checkpoint at ``path`` overrides.

    ``asked`` and ``used`` are the settings with the user's and with the checkpoint's options.
    """
    names = {each.name.partition(".")[0] for each in given.options}
    for option in OPTIONS:
        if option in names and _plain(asked[option]) != _plain(used[option]):
            stored = used[option] and used[option].get("class_path", "another one")
            print_note(
                f"--{option} is ignored: {path} was trained with "
                f"{stored or 'the default of the model'} (--weights in place of --ckpt_path starts "
                "a new run)"
            )


def install(model: ZooModule, settings: Namespace, rate_of_model: bool) -> Callback | None:
    """Replace the model's ``configure_optimizers`` according to the subcommand's settings.

    ``rate_of_model``: use ``model.lr``, read when training begins. Returns a callback that stores
    the options in checkpoints; None without options.
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

    # torch's stubs do not allow functions as attributes.
    model.__dict__["configure_optimizers"] = configure_optimizers
    return _StoreOptions(settings)


class _StoreOptions(Callback):
    def __init__(self, settings: Namespace) -> None:
        self.settings = settings

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[OPTIMIZATION] = {option: _plain(self.settings[option]) for option in OPTIONS}


def _optimizer(model: ZooModule, config: dict[str, Any]) -> Optimizer:
    """The optimizer of a configuration; fused on a CPU, as the models' own are."""
    # Frozen parameters may join later, in another parameter group.
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
            f"{type(model).__name__} has its own schedule or several optimizers: give "
            "--optimizer together with --lr_scheduler to replace them"
        )
    return configured


def _plain(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value
