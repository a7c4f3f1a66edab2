"""Option errors of training, detected before torch and Lightning are imported.

Those imports take seconds. Names are read from the sources of the trainer and of ln_zoo's
classes. Anything uncertain, and the classes of other packages, is left to the parser.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from ln_zoo.cli.arguments import Arguments, Option
from ln_zoo.cli.errors import fail, nearest_option
from ln_zoo.zoo.names import nearest

#: Package and base class of the classes that an option takes.
CLASS_FOLDERS = {
    "model": ("models", "ZooModule"),
    "data": ("data", "LightningDataModule"),
    "norm": ("norms", "Norm"),
}
#: Options of every command; arguments of the trainer's method are added.
_OPTIONS = (
    "c", "config", "data", "lr_scheduler", "lr_scheduler_config", "model", "optimizer",
    "print_config", "seed_everything", "test_after_fit", "trainer", "weights",
)  # fmt: skip
#: Options that take a class; the trainer's take several.
_CLASS_OPTIONS = (
    "model", "data", "optimizer", "lr_scheduler", "trainer.callbacks", "trainer.logger",
    "trainer.plugins",
)  # fmt: skip
#: Names of a function's parameters; ``"*"`` stands for any others.
Parameters = tuple[str, ...]


def check(given: Arguments) -> None:
    """Exits with code 2 at the first option whose name is certainly wrong."""
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
            return  # a stray value: the options after it are uncertain
        first, _, rest = each.name.partition(".")
        place = f"trainer.{rest.partition('.')[0]}" if first == "trainer" and rest else first
        if each.where.startswith("LN_ZOO_"):
            _check_variable(each, place, given.command, known)
        elif place not in known:
            what = (
                f"unknown argument {each.where}" if each.where else f"unknown option {each.name!r}"
            )
            fail(what + nearest_option(each.name, known), given.command)
        _check_class_option(each, given.command)
    for group in ("model", "data"):
        if given.lacks_class(group):
            fail(f"{group} has no class: give --{group} NAME, or {group}.class_path", given.command)
        _check_class(group, group, given)


def _check_class_option(each: Option, command: str) -> None:
    if each.name == "trainer" and each.value is not None:
        fail(f"trainer must be a mapping of options, got {each.value!r:.80}", command)
    if each.name not in _CLASS_OPTIONS:
        return
    value = each.value
    several = isinstance(value, list) and each.name.startswith("trainer.")
    # None is the default; a bool enables or disables Lightning's logger.
    wrong = not (several or value is None or isinstance(value, str | bool))
    for item in value if several else ():
        if not (isinstance(item, str) or (isinstance(item, dict) and "class_path" in item)):
            value, wrong = item, True
    if wrong:
        shown = "null" if value is None else reprlib.repr(value)
        expected = "the name of a class, or class_path and init_args"
        fail(f"{each.name} must be {expected}, got {shown}", command)


def _check_variable(each: Option, place: str, command: str, known: Iterable[str]) -> None:
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
    values = [each.value for each in given.options if each.name == place]
    name = values[0] if values and values.count(values[0]) == len(values) else None
    if not isinstance(name, str):
        return
    known = classes(*CLASS_FOLDERS[group])
    if "." not in name and name.isidentifier() and name not in known:
        # Installed packages may bring classes of any kind.
        if not entry_points(group="ln_zoo.norms"):
            listed = ", ".join(sorted(known))
            fail(f"{place}: no class {name!r}{nearest(name, known)} ({listed})", given.command)
        return
    *package, name = name.split(".")
    if (package and package[0] != "ln_zoo") or (parameters := known.get(name)) is None:
        return
    for each in given.options:
        if not each.name.startswith(f"{place}."):
            continue
        argument = each.name.removeprefix(f"{place}.").partition(".")[0]
        if argument not in (*parameters, "dict_kwargs"):
            near, listed = nearest(argument, parameters), ", ".join(parameters)
            text = f"{place}: {name} takes no argument {argument!r}{near} (it takes {listed})"
            fail(text, given.command)
    if "norm" in parameters:
        _check_class("norm", f"{place}.norm", given)


@functools.cache
def classes(package: str, root: str) -> Mapping[str, Parameters | None]:
    """Parameters of the public classes of a subpackage by name; None if they are not certain.

    ``root`` is the name of the base class.

    Example:
        >>> classes("norms", "Norm")["RMSNorm"]
        ('gain', 'eps')
    """
    files = (Path(__file__).parents[1] / package).rglob("*.py")
    found = {name: rest for path in files for name, rest in _classes_in(path, root)}
    parameters: dict[str, Parameters | None] = {}
    for name in found:
        mro = [name]
        while mro[-1] in found:
            mro.append(found[mro[-1]][0])
        if root in mro[1:] and not name.startswith("_"):
            first = next((found[n][1] for n in mro if n in found and found[n][1]), ("*",))
            parameters[name] = None if "*" in first else first
    return parameters


def _classes_in(path: Path, root: str) -> Iterator[tuple[str, tuple[str, Parameters]]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            base = ast.unparse(node.bases[0]).partition("[")[0] if node.bases else ""
            base, parameters = base.rpartition(".")[2], _parameters(node, "__init__")
            if not parameters and any("dataclass" in ast.unparse(m) for m in node.decorator_list):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                own = [f for f in fields if "ClassVar" not in ast.unparse(f.annotation)]
                parameters = tuple(ast.unparse(f.target) for f in own)
                parameters += () if base == root else ("*",)  # fields of the base
            yield node.name, (base, parameters)


@functools.cache
def _trainer(method: str) -> Parameters:
    """Parameters of a method of Lightning's trainer; empty if its source is not found."""
    package = importlib.util.find_spec("lightning")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "pytorch/trainer/trainer.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name == "Trainer":
                return _parameters(node, method)
    return ()


def _parameters(node: ast.ClassDef, method: str) -> Parameters:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == method:
            named = [p.arg for p in (*part.args.args[1:], *part.args.kwonlyargs)]
            return (*named, *(("*",) if part.args.kwarg or part.args.vararg else ()))
    return ()
