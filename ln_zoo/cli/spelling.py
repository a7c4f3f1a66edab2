"""Misspelt names among the options of training, found before torch and Lightning are imported.

Those imports take seconds. Names are read from the sources of the trainer and of ln_zoo's classes;
values, types and the classes of others are left to the parser.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from ln_zoo.cli.arguments import Arguments, Given
from ln_zoo.cli.errors import fail, nearest_option
from ln_zoo.zoo.names import nearest

#: The package of each option's classes, and their base class.
ROOMS = {"model": ("models", "ZooModule"), "data": ("data", "LightningDataModule")} | {
    "norm": ("norms", "Norm")
}
#: Options of every command, beside the arguments of the trainer's method.
_OPTIONS = (
    "c", "config", "data", "lr_scheduler", "lr_scheduler_config", "model", "optimizer",
    "print_config", "seed_everything", "test_after_fit", "trainer", "weights",
)  # fmt: skip


def check(given: Arguments) -> None:
    """Ends the program at the first name that is certainly wrong.

    Raises:
        SystemExit: with code 2.
    """
    asked = [each for each in given.options if each.name in ("help", "h") or ".help" in each.name]
    for each in asked:
        group = each.name.partition(".")[0]
        if group in ("model", "data") and "." in each.name and not given.has(group):
            fail(f"{each.where} needs a {group}: give --{group} NAME before it", given.command)
    trainer, method = _trainer("__init__"), _trainer(given.command)
    if asked or not trainer or not method:
        return
    known = {*_OPTIONS, *method, *(f"trainer.{name}" for name in trainer)}
    for each in given.options:
        if not each.name:
            return  # a value without an option: what follows may be read in another way
        first, _, rest = each.name.partition(".")
        place = f"trainer.{rest.partition('.')[0]}" if first == "trainer" and rest else first
        if each.where.startswith("LN_ZOO_"):
            _check_variable(each, place, given.command, known)
        elif place not in known:
            what = (
                f"unknown argument {each.where}" if each.where else f"unknown option {each.name!r}"
            )
            fail(what + nearest_option(each.name, known), given.command)
    for group in ("model", "data"):
        _check_class(group, group, given)


def _check_variable(each: Given, place: str, command: str, known: Iterable[str]) -> None:
    group, _, rest = each.name.partition(".")
    if group in ("model", "data") and f"{group.upper()}__{rest.upper()}" in each.where:
        whole = f"LN_ZOO_{command}__{group}".upper()
        fail(
            f"{each.where} is not read: give --{each.name}, or the {group} as a whole in "
            f"{whole}='{{class_path: NAME, init_args: {{...}}}}'",
            command,
        )
    if place not in known:
        variables = [f"LN_ZOO_{command}__{name.replace('.', '__')}".upper() for name in known]
        fail(f"{each.where} names no option of {command}{nearest(each.where, variables)}", command)


def _check_class(group: str, place: str, given: Arguments) -> None:
    """Checks the class that an option names, and the names of its arguments."""
    values = [each.value for each in given.options if each.name == place]
    name = values[0] if values and values.count(values[0]) == len(values) else None
    if not isinstance(name, str):
        return
    known = classes(*ROOMS[group])
    if "." not in name and name.isidentifier() and name not in known:
        # Installed packages may bring classes of any kind.
        if not entry_points(group="ln_zoo.norms"):
            listed = ", ".join(sorted(known))
            fail(f"{place}: no class {name!r}{nearest(name, known)} ({listed})", given.command)
        return
    *room, name = name.split(".")
    if (room and room[0] != "ln_zoo") or (parameters := known.get(name)) is None:
        return
    for each in given.options:
        argument = each.name.removeprefix(f"{place}.").partition(".")[0]
        if each.name.startswith(f"{place}.") and argument not in (*parameters, "dict_kwargs"):
            near, listed = nearest(argument, parameters), ", ".join(parameters)
            text = f"{place}: {name} takes no argument {argument!r}{near} (it takes {listed})"
            fail(text, given.command)
    if "norm" in parameters:
        _check_class("norm", f"{place}.norm", given)


@functools.cache
def classes(room: str, root: str) -> dict[str, list[str] | None]:
    """Arguments of the public classes of a package by name; None if they are not certain.

    Args:
        room: the package.
        root: their base class.

    Example:
        >>> classes("norms", "Norm")["RMSNorm"]
        ['gain', 'eps']
    """
    files = (Path(__file__).parents[1] / room).glob("*.py")
    found = {name: rest for path in files for name, rest in _classes_in(path, root)}
    arguments: dict[str, list[str] | None] = {}
    for name in found:
        line = [name]
        while line[-1] in found:
            line.append(found[line[-1]][0])
        if root in line[1:] and not name.startswith("_"):
            first = next((found[n][1] for n in line if n in found and found[n][1]), ["*"])
            arguments[name] = None if "*" in first else first
    return arguments


def _classes_in(path: Path, root: str) -> Iterable[tuple[str, tuple[str, list[str]]]]:
    """Name, first base and arguments of classes; ``"*"`` among the last stands for any others."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            base = ast.unparse(node.bases[0]).partition("[")[0] if node.bases else ""
            base, parameters = base.rpartition(".")[2], _parameters(node, "__init__")
            if not parameters and any("dataclass" in ast.unparse(m) for m in node.decorator_list):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                names = {ast.unparse(f.target): ast.unparse(f.annotation) for f in fields}
                parameters = [name for name, kind in names.items() if "ClassVar" not in kind]
                parameters += ["*"] * (base != root)  # fields of the base
            yield node.name, (base, parameters)


@functools.cache
def _trainer(method: str) -> list[str]:
    """Arguments of a method of Lightning's trainer; empty if its source is not found."""
    package = importlib.util.find_spec("lightning")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "pytorch/trainer/trainer.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name == "Trainer":
                return _parameters(node, method)
    return []


def _parameters(node: ast.ClassDef, method: str) -> list[str]:
    """Names of a method's parameters, ``"*"`` among them if it takes any others."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == method:
            names = [each.arg for each in (*part.args.args[1:], *part.args.kwonlyargs)]
            return names + ["*"] * bool(part.args.kwarg or part.args.vararg)
    return []
