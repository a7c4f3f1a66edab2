"""Mistakes in the options of training that the parser lets pass, or reports badly."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.util import find_spec

from ln_zoo.cli.arguments import Arguments
from ln_zoo.utils.names import nearest

#: Options that take a class; variables of the environment give a class with all its arguments.
_CLASSES = ("model", "data", "optimizer", "lr_scheduler")
#: Packages of Lightning's loggers, either of several.
_LOGGERS = {
    "CometLogger": ("comet_ml",), "LitLogger": ("litlogger",), "MLFlowLogger": ("mlflow",),
    "NeptuneLogger": ("neptune",), "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
}  # fmt: skip
#: Further options of every command, beside those of the trainer.
_OPTIONS = ("config", "seed_everything", "test_after_fit", "trainer", "weights")


def check(given: Arguments) -> None:
    """Raises ValueError for a trainer without options, and for a variable that is not read.

    A variable is a name such as ``LN_ZOO_FIT__MODEL``, with the command in it. The package of a
    logger must be installed.
    """
    for each in given.options:
        if each.name == "trainer" and each.value is not None:
            raise ValueError(f"trainer must be a mapping of options, got {each.value!r:.80}")
        if each.name == "trainer.logger":
            _check_logger(str(each.value).rpartition(".")[2])
        if each.where.startswith("LN_ZOO_"):
            _check_variable(each.where, each.name, given.command)


def _check_logger(name: str) -> None:
    packages = _LOGGERS.get(name, ())
    if packages and not any(map(find_spec, packages)):
        raise ValueError(
            f"trainer.logger: {name} needs the package {packages[0]}: pip install {packages[0]}"
        )


def _check_variable(variable: str, option: str, command: str) -> None:
    prefix = f"LN_ZOO_{command}__".upper()
    variables = [prefix + name.replace(".", "__").upper() for name in options(command)]
    if variable in variables:
        return
    hint = nearest(variable, variables)
    if (group := option.partition(".")[0]) in _CLASSES:
        hint = (
            f": give --{option}, or the {group} as a whole in "
            f"{prefix}{group.upper()}='{{class_path: NAME, init_args: {{...}}}}'"
        )
    raise ValueError(f"{variable} is not an option of {command}{hint}")


def options(command: str) -> Iterator[str]:
    """Names of the options of a command, without the arguments of classes."""
    from lightning.pytorch import Trainer  # takes seconds

    from ln_zoo.cli.optimizers import SchedulerConfig

    yield from (*_CLASSES, *_OPTIONS)
    yield from inspect.signature(getattr(Trainer, command)).parameters
    for group, cls in (("trainer", Trainer), ("lr_scheduler_config", SchedulerConfig)):
        yield from (f"{group}.{name}" for name in inspect.signature(cls).parameters)
