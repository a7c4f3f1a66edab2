"""Mistakes among the options that can be told before torch and Lightning are imported.

That takes seconds, and most mistakes are a misspelt name or a value of another type. What is not
certain from the sources alone, such as the arguments of a user's own class, is left to the parser.
"""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from ln_zoo.cli import arguments, signatures
from ln_zoo.cli.arguments import Given
from ln_zoo.cli.errors import OneLineErrors, cause, fail, no_argument, no_class, no_option
from ln_zoo.cli.names import nearest

#: Options of every command, beside those that are arguments of the trainer's method.
_OPTIONS: dict[str, Any] = {
    "c": Any,
    "config": Any,
    "data": Any,
    "lr_scheduler": Any,
    "lr_scheduler_config": Any,
    "model": Any,
    "optimizer": Any,
    "print_config": Any,
    "seed_everything": bool | int,
    "test_after_fit": bool,
    "trainer": Any,
    "weights": str | None,
}
#: Least values that the trainer needs and does not check: it divides by them.
_LEAST = {"trainer.accumulate_grad_batches": 1, "trainer.check_val_every_n_epoch": 1}
#: The largest numbers that torch takes.
_LARGEST_INT, _LARGEST_FLOAT = 2**63 - 1, 3.4e38
#: Arguments of the trainer's methods that are built from options.
_BUILT = ("model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")


def check(argv: list[str]) -> None:
    """Ends the program, as the parser would, at the first mistake that is certain.

    Args:
        argv: arguments, the subcommand first.

    Raises:
        FileNotFoundError: for a configuration or a checkpoint that is not there.
        SystemExit: with code 2, for an option that is unknown or of another type.
        ValueError: for a configuration that is not YAML.
    """
    given = list(arguments.options(argv))
    classes = {option.name.removesuffix(".class_path") for option in given}
    for option in given:
        group, _, rest = option.name.partition(".")
        if group in ("model", "data") and rest.endswith(".help") and group not in classes:
            fail(f"{option.argument} needs a {group}: give --{group} NAME before it", argv[0])
    if any(option.name in ("help", "h") or option.name.endswith(".help") for option in given):
        return
    _check_options(argv[0], given)
    for group in ("model", "data"):
        _check_class(argv[0], group, group, given)
    path = arguments.given(argv, "ckpt_path")
    if path not in (None, "last") and arguments.given(argv, "weights") is None:
        arguments.check_checkpoint(str(path))


def _check_options(command: str, given: list[Given]) -> None:
    """Checks the options of the command itself and of the trainer."""
    trainer, method = signatures.trainer(), signatures.trainer(command)
    if trainer is None or method is None:
        return
    types = _OPTIONS | {name: t for name, t in method.parameters.items() if name not in _BUILT}
    types |= {f"trainer.{name}": t for name, t in trainer.parameters.items()}
    for option in given:
        if not option.name:
            return  # a value without an option: what follows may be read in another way
        first, _, rest = option.name.partition(".")
        place = f"trainer.{rest.partition('.')[0]}" if first == "trainer" and rest else first
        if option.variable and option.name not in types:
            fail(_no_variable(command, option, types), command)
        if place not in types:
            fail(no_option(command, option.name, option.argument, types), command)
        if place == option.name:
            _check_value(command, option, types[place])


def _check_class(command: str, group: str, place: str, given: list[Given]) -> None:
    """Checks which class an option names, and the arguments for it.

    Args:
        command: the subcommand.
        group: of the classes, as in `signatures.ROOMS`.
        place: the option, such as ``model.norm``.
        given: all options.
    """
    known = signatures.classes(group)
    named: set[str] = set()
    for option in given:
        if option.name in (place, f"{place}.class_path") and option.value is not None:
            name = option.value
            if isinstance(content := _content(option), bool | int | float | list):
                names = ", ".join(sorted(n for n, signature in known.items() if signature.concrete))
                fail(
                    f"{place}: expected the name of a class ({names}), or its class_path with "
                    f"init_args, got {content!r}",
                    command,
                )
            if not isinstance(name, str) or os.path.isfile(name):
                return
            if not all(part.isidentifier() for part in name.split(".")) or content is None:
                return  # a class with its arguments, or none
            if "." not in name and name not in known:
                if not entry_points(group="ln_zoo.norms"):  # they may bring classes of any kind
                    concrete = [n for n, signature in known.items() if signature.concrete]
                    fail(f"{place}: {no_class(name, concrete)}", command)
                return
            named.add(name)
    if len(named) != 1:
        return
    *room, name = named.pop().split(".")
    if (room and room[0] != "ln_zoo") or name not in known or not known[name].concrete:
        return
    for option in given:
        if option.name.startswith(f"{place}.") and option.name != f"{place}.class_path":
            parameter = option.name.removeprefix(f"{place}.").partition(".")[0]
            if parameter == "dict_kwargs" or known[name].open:
                return
            if parameter not in known[name].parameters:
                text = no_argument(name, parameter, known[name].parameters)
                fail(f"{place}: {text}", command)
            if option.name == f"{place}.{parameter}":
                _check_value(command, option, known[name].parameters[parameter])
    if "norm" in known[name].parameters:
        _check_class(command, "norm", f"{place}.norm", given)


def _check_value(command: str, option: Given, expected: Any) -> None:
    """Checks a value as the parser of the whole command line would."""
    if expected is Any or option.value is None:
        return
    parser = _ValueParser(exit_on_error=False)
    parser.add_argument(f"--{option.name}", type=expected)
    where = f"{option.variable}: " if option.variable else ""
    content = _content(option)
    try:
        if option.argument or option.variable:
            content = parser.parse_args([f"--{option.name}={option.value}"])[option.name]
        else:
            parser.parse_object({option.name: option.value})
    except ArgumentError as error:
        if str(content).lower().lstrip("+-.") in ("nan", "inf"):
            fail(f"{where}{option.name}: expected a finite number, got {content}", command)
        fail(where + cause(error.message), command)
    for value in content if isinstance(content, list | tuple) else [content]:
        largest = _LARGEST_INT if isinstance(value, int) else _LARGEST_FLOAT
        if isinstance(value, int | float) and not -largest <= value <= largest:
            fail(
                f"{where}{option.name}: expected a number of at most {largest:.2g}, got {value:g}",
                command,
            )
    least = _LEAST.get(option.name)
    if least is not None and isinstance(content, int) and content < least:
        fail(f"{where}{option.name}: must be at least {least}, got {content}", command)


class _ValueParser(OneLineErrors, ArgumentParser):
    """A parser of one value."""


def _no_variable(command: str, option: Given, types: Mapping[str, Any]) -> str:
    """That a variable of the environment stands for no option."""
    group, _, rest = option.name.partition(".")
    if group in ("model", "data") and rest:
        whole = f"LN_ZOO_{command}__{group}".upper()
        return (
            f"{option.variable} is not read: give --{option.name}, or the {group} as a whole in "
            f"{whole}='{{class_path: NAME, init_args: {{...}}}}'"
        )
    variables = [f"LN_ZOO_{command}__{name.replace('.', '__')}".upper() for name in types]
    return f"{option.variable} names no option of {command}{nearest(option.variable, variables)}"


def _content(option: Given) -> Any:
    try:
        return option.content
    except yaml.YAMLError:
        return option.value
