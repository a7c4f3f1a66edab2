"""What an untrusted checkpoint may contain: plain values, and names of ln_zoo's classes.

Importing a module runs its code. A class of another package is used only if it is loaded already or
if the user names it. Imports no torch.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from ln_zoo.zoo.errors import first_line


class OwnModuleError(ValueError):
    """A module that the user named cannot be imported."""


#: Errors of torch for content that weights-only loading rejects.
_REFUSED = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"load (\S+) whose module \S+ is blocked"),
    re.compile(r"instantiate class (\S+)"),
)
#: Text in which a parser may find the path of a class, or a file: also as YAML or JSON.
_CLASS = re.compile(r"\w\.\w|\{|class_path|\\[xuUN]")


def check_classes(
    hyper_parameters: object, where: str, remedy: str, named: Collection[str] = ()
) -> dict[str, Any]:
    """The hyperparameters of a checkpoint, if all classes that they name may be imported.

    Those are classes of ``ln_zoo``, of modules that are already imported, and in ``named``, the
    class paths that the user gave. Nothing is imported here.

    Args:
        hyper_parameters: as the checkpoint holds them.
        where: name of the checkpoint in errors.
        remedy: suggestion for a class of another module that the user trusts; ``{place}``
            (``model``, ``model.norm``), ``{path}`` and ``{module}`` stand for it.
        named: class paths that the user gave.

    Raises:
        ValueError: for any other class, or if they are not what a model of ln_zoo stores.

    Example:
        >>> stored = {"_class_path": "my_models.Mine", "norm": None}
        >>> check_classes(stored, "x.ckpt", "give --{place} {path}")
        Traceback (most recent call last):
            ...
        ValueError: x.ckpt is of my_models.Mine, ... give --model my_models.Mine
        >>> check_classes(stored, "x.ckpt", "", named={"my_models.Mine"}) == stored
        True
    """
    if not isinstance(hyper_parameters, Mapping) or "_class_path" not in hyper_parameters:
        raise ValueError(
            f"{where} does not name its model class: it was not written by a model of ln_zoo"
        )
    norm = hyper_parameters.get("norm")
    if norm is not None and not (isinstance(norm, Mapping) and "class_path" in norm):
        # A name or a path given as text would be looked up, or read as a configuration file.
        raise ValueError(
            f"{where}: norm must be stored as class_path and init_args, got {norm!r:.80}: it was "
            "not written by a model of ln_zoo"
        )
    for place, path in _class_paths(hyper_parameters):
        if not isinstance(path, str):
            raise ValueError(f"{where}: a class path must be text, got {path!r:.80}")
        if path not in named and not is_loaded(path):
            verb = "is of" if place == "model" else "asks for"
            how = remedy.format(place=place, path=path, module=path.rpartition(".")[0])
            raise ValueError(
                f"{where} {verb} {path}, which is not one of ln_zoo's classes, and modules named "
                f"in a file are not imported: if you trust the file, {how}"
            )
    return dict(hyper_parameters)


def is_loaded(class_path: str) -> bool:
    """Whether importing a class runs no code but ours: its module is ours, or imported already.

    Example:
        >>> is_loaded("ln_zoo.norms.LayerNorm"), is_loaded("my_norm.MyNorm")
        (True, False)
    """
    module, *names = class_path.split(".")
    if module == "ln_zoo":
        return True
    found: object = sys.modules.get(module)
    for name in names:
        module = f"{module}.{name}"
        # Without asking: a module may import another when it is asked for a name.
        found = sys.modules.get(module) or getattr(found, "__dict__", {}).get(name)
    return found is not None


def why_unreadable(error: Exception) -> str:
    """Why torch could not read a checkpoint, in a few words.

    torch's own account of what it refuses to run recommends to run it (``weights_only=False``).

    Example:
        >>> why_unreadable(ValueError("... Unsupported global: GLOBAL os.system was"))
        'it asks for os.system, and only tensors and plain values are read: others can run code'
    """
    text = str(error)
    for pattern in _REFUSED:
        if match := pattern.search(text):
            name = match[1].rstrip(".,")
            return (
                f"it asks for {name}, and only tensors and plain values are read: others can run "
                "code"
            )
    if text.strip() and isinstance(error, OSError | RuntimeError):
        return first_line(error)
    return "it holds something other than a checkpoint"


def import_own(module: str) -> None:
    """Imports a module that the user named with ``--import``."""
    try:
        importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:
        raise OwnModuleError(
            f"--import {module}: {error}: give the name of a module, such as my_models for "
            "my_models.py in the current folder"
        ) from error


def _class_paths(hyper_parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every class path, with the option that sets it."""
    found: list[tuple[str, Any]] = [("model", hyper_parameters["_class_path"])]
    # Text in arguments of other classes is theirs to read: the user named them.
    ours = str(hyper_parameters["_class_path"]).startswith("ln_zoo.")
    arguments = {k: v for k, v in hyper_parameters.items() if not str(k).startswith("_")}
    waiting: list[tuple[str, Any]] = [("model", arguments)]
    seen: set[int] = set()  # a pickle may hold itself
    while waiting:
        place, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            if "class_path" in value:
                found.append((place, value["class_path"]))
            for key, inner in value.items():
                if key == "vocabulary" and isinstance(inner, list):
                    continue
                if key == "vocabulary" and isinstance(inner, str) and ours:
                    found.append((f"{place}.{key}", inner))  # any word may name a file
                    continue
                waiting.append((place if key == "init_args" else f"{place}.{key}", inner))
        elif isinstance(value, str) and ours and _CLASS.search(value):
            # An argument that takes a class would import it.
            found.append((place, value))
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += [(place, inner) for inner in value]
    return found
