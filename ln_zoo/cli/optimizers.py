"""``--optimizer`` and ``--lr_scheduler``: replace the model's own.

Checkpoints store both, so that a resumed run keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from torch.optim.lr_scheduler import LRScheduler

from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.notes import plain, print_note
from ln_zoo.models.base import fused_on_cpu
from ln_zoo.utils import schema, trust

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


def use_rate_of_model(optimizer: Namespace | None, rate: float | None, given: Arguments) -> bool:
    """Set the learning rate of ``--optimizer`` to the model's, unless the user gave one.

    Returns whether the model's rate is used.
    """
    if optimizer is None or rate is None or "lr" not in optimizer.init_args:
        return False
    if given.has("optimizer.lr"):
        if optimizer.init_args.lr != rate:
            print_note(f"model.lr = {rate} is ignored: optimizer.lr is {optimizer.init_args.lr}")
        return False
    optimizer.init_args.lr = rate
    return True


def of_checkpoint(checkpoint: Mapping[str, Any], path: str, given: Arguments) -> Namespace:
    """The options that a checkpoint was trained with; None for the model's own optimizer.

    Raises:
        CardError: if a value is not of its argument's kind, or a class or function is neither
            loaded nor named by the user in ``given``.
    """
    stored = schema.read_as(dict, checkpoint.get(OPTIMIZATION) or {}, f"{path}: {OPTIMIZATION}")
    reader = trust.Reader(path, "give --{place} {path}", given.named())
    found = Namespace(dict.fromkeys(OPTIONS))
    for option, base in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler)):
        if config := stored.get(option):
            config = schema.read_as(dict, config, f"{path}: {option}")
            cls = reader.find(config.get("class_path"), base, option)
            arguments = reader.arguments(cls, config.get("init_args", {}), option)
            found[option] = Namespace(config | {"init_args": Namespace(arguments)})
    config = stored.get(OPTIONS[2]) or {}
    arguments = reader.arguments(SchedulerConfig, config, OPTIONS[2])
    found[OPTIONS[2]] = Namespace(asdict(SchedulerConfig(**arguments)))
    return found


def note_ignored(asked: Namespace, used: Namespace, given: Arguments, path: str) -> None:
    """Notes the user's options that the checkpoint at ``path`` overrides.

    ``asked`` and ``used`` are the settings with the user's and with the checkpoint's options.
    """
    names = {each.name.partition(".")[0] for each in given.options}
    for option in OPTIONS:
        if option in names and plain(asked[option]) != plain(used[option]):
            stored = used[option] and used[option].get("class_path", "another one")
            print_note(
                f"--{option} is ignored: {path} was trained with "
                f"{stored or 'the default of the model'} (--weights in place of --ckpt_path starts "
                "a new run)"
            )


def install(model: LightningModule, settings: Namespace, rate_of_model: bool) -> list[Callback]:
    """Replace the model's ``configure_optimizers`` according to the subcommand's settings.

    ``rate_of_model``: use ``model.lr``, read when training begins. Returns a callback that stores
    the options in checkpoints, if there are any.
    """
    if settings.optimizer is None and settings.lr_scheduler is None:
        return []
    own = model.configure_optimizers

    def configure_optimizers() -> OptimizerLRScheduler:
        if settings.optimizer is None:
            optimizer = _single(model, own())
        else:
            if rate_of_model:
                settings.optimizer.init_args.lr = getattr(model, "lr", model.hparams.get("lr"))
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
    return [_StoreOptions(settings)]


class _StoreOptions(Callback):
    def __init__(self, settings: Namespace) -> None:
        self.settings = settings

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[OPTIMIZATION] = {option: plain(self.settings[option]) for option in OPTIONS}


def _optimizer(model: LightningModule, config: dict[str, Any]) -> Optimizer:
    """The optimizer of a configuration; fused on a CPU, as the models' own are."""
    # Frozen parameters may join later, in another parameter group.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Optimizer = instantiate_class(trained, config)
    choices = ("fused", "foreach", "differentiable")
    if isinstance(optimizer, (Adam, SGD)) and not any(config["init_args"].get(c) for c in choices):
        arguments = config["init_args"] | fused_on_cpu(model)
        optimizer = instantiate_class(trained, config | {"init_args": arguments})
    return optimizer


def _single(model: LightningModule, configured: OptimizerLRScheduler) -> Optimizer:
    if not isinstance(configured, Optimizer):
        raise MisconfigurationException(
            f"{type(model).__name__} has its own schedule or several optimizers: give "
            "--optimizer together with --lr_scheduler to replace them"
        )
    return configured
