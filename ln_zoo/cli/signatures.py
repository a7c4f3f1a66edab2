"""Classes and their arguments, read from source files without importing them.

Importing torch and Lightning takes seconds; a misspelt option is to be told at once.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Where the classes that an option takes are defined, and what they derive from.
ROOMS = {"model": ("models", "ZooModule"), "data": ("data", "LightningDataModule")} | {
    "norm": ("norms", "Norm")
}
_TYPES: dict[str, Any] = {name: getattr(typing, name) for name in ("Literal", "Optional", "Union")}
_TYPES |= {t.__name__: t for t in (bool, dict, float, int, list, str, tuple)}


@dataclass(frozen=True)
class Signature:
    """What a class or method takes.

    Attributes:
        name: of the class or method.
        parameters: types by name; `Any` where a type is not a plain one of Python.
        open: whether it takes further arguments of any name.
        concrete: whether there can be instances of the class.
    """

    name: str
    parameters: dict[str, Any]
    open: bool = False
    concrete: bool = True


@functools.cache
def classes(group: str) -> dict[str, Signature]:
    """The classes of the zoo that an option takes, by name.

    Args:
        group: ``"model"``, ``"data"`` or ``"norm"``.

    Example:
        >>> classes("norm")["RMSNorm"].parameters
        {'gain': <class 'float'>, 'eps': <class 'float'>}
        >>> classes("norm")["Norm"].concrete
        False
    """
    room, root = ROOMS[group]
    trees = [_tree(path) for path in sorted((Path(__file__).parents[1] / room).glob("*.py"))]
    nodes = {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}
    types = _types_by_class(trees)
    found = {}
    for name in nodes:
        line = list(_line(name, nodes))
        if root in line and not name.startswith("_"):
            members = [nodes[n] for n in line if n in nodes]
            concrete = name != root and not _abstract(members)
            found[name] = _signature(name, members, types, concrete)
    return found


@functools.cache
def trainer(method: str = "__init__") -> Signature | None:
    """What Lightning's trainer, or one of its methods, takes; nothing if its source is not found.

    Args:
        method: such as ``"fit"``.

    Example:
        >>> trainer().parameters["max_epochs"]
        typing.Optional[int]
    """
    package = importlib.util.find_spec("lightning")
    folders = (package and package.submodule_search_locations) or []
    for path in (Path(folder) / "pytorch/trainer/trainer.py" for folder in folders):
        if path.is_file():
            for node in ast.walk(_tree(path)):
                if isinstance(node, ast.ClassDef) and node.name == "Trainer":
                    return _signature("Trainer", [node], {"Trainer": {}}, method=method)
    return None


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _line(name: str, nodes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """The class, its first base, the first base of that, ... up to one that is not of the room."""
    yield name
    while name in nodes and nodes[name].bases:
        base = nodes[name].bases[0]
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        yield name


def _abstract(members: list[ast.ClassDef]) -> bool:
    """Whether a method that one of the classes declares is left to subclasses."""
    open_methods: set[str] = set()
    for node in reversed(members):
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                marks = {getattr(mark, "id", "") for mark in part.decorator_list}
                (open_methods.add if "abstractmethod" in marks else open_methods.discard)(part.name)
            elif isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                open_methods -= {getattr(target, "id", "") for target in targets}
    return bool(open_methods)


def _signature(
    name: str,
    members: list[ast.ClassDef],
    types: dict[str, dict[str, Any]],
    concrete: bool = True,
    method: str = "__init__",
) -> Signature:
    """The signature of a class's method, of the nearest of the classes that defines it.

    Args:
        name: of the class.
        members: the class and its bases.
        types: literals by name that each class's file knows, by class.
        concrete: whether there can be instances.
        method: whose arguments are asked for.
    """
    fields: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for node in members:
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == method:
                arguments = part.args
                named = [*arguments.args[1:], *arguments.kwonlyargs]
                missing = [None] * (len(arguments.args) - len(arguments.defaults))
                defaults = [*missing, *arguments.defaults]
                values = [*defaults[1:], *arguments.kw_defaults]
                for a, default in zip(named, values, strict=True):
                    given.setdefault(a.arg, _type(a.annotation, default, types[node.name]))
                if arguments.kwarg is None:
                    return Signature(name, given, arguments.vararg is not None, concrete)
        if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
            assigned = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            for part in assigned:
                if "ClassVar" not in ast.unparse(part.annotation):
                    known = types[node.name]
                    fields[ast.unparse(part.target)] = _type(part.annotation, part.value, known)
    return Signature(name, given or fields, bool(given), concrete)


def _type(annotation: ast.expr | None, default: ast.expr | None, types: dict[str, Any]) -> Any:
    """The type that an annotation names, if it is built of plain ones."""
    if annotation is None:
        return Any
    try:
        found = _evaluated(annotation, types)
    except Exception:  # whatever else an annotation may hold is left to who imports it
        return Any
    if isinstance(found, str):
        return Any
    if isinstance(default, ast.Constant) and default.value is None:
        found = typing.Optional[found]  # noqa: UP045
    return found


def _types_by_class(trees: list[ast.Module]) -> dict[str, dict[str, Any]]:
    """Literals by name that each class may mean: those of its own file, then those of others.

    Two files may give one name to different literals; what a third file means by it is not known.
    """
    everywhere: dict[str, Any] = {}
    twice: set[str] = set()
    for tree in trees:
        for name, found in _aliases(tree):
            if everywhere.setdefault(name, found) != found:
                twice.add(name)
    shared = {name: found for name, found in everywhere.items() if name not in twice}
    return {
        node.name: shared | dict(_aliases(tree))
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _aliases(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that a file gives to literals, as in ``Split = Literal["graves", "all"]``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            for target in node.targets:
                yield ast.unparse(target), _evaluated(node.value, {})


def _evaluated(node: ast.expr, types: dict[str, Any]) -> Any:
    return eval(  # of this package's or Lightning's own source, in which no other name is known
        compile(ast.Expression(node), "annotation", "eval"), {"__builtins__": {}}, _TYPES | types
    )
