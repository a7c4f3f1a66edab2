"""Files that ship with the package: data, templates, configurations and tables of results."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

#: Where files of the repository are: in an installed package, or around that of a checkout.
_PACKAGE = Path(__file__).resolve().parents[1]
ROOTS = (_PACKAGE, _PACKAGE.parent)


def root_with(folder: str) -> Path:
    """The current folder if it has this folder of the repository, else where ours is."""
    return next(root for root in (Path.cwd(), *ROOTS) if (root / folder).is_dir())


def find_config(text: str) -> Path | None:
    """A configuration by path or name, or None: ``mlp/paper`` is ``configs/mlp/paper.yaml``.

    A file of the user's goes before ours of the same name.
    """
    ending = "" if text.endswith((".yaml", ".yml")) else ".yaml"
    # Not an absolute path, nor one that leaves the folder.
    named = [text, f"configs/{text}{ending}"] if ".." not in text else [text]
    found = (root / name for name in named for root in (Path(), *ROOTS))
    # False where the system has no file of such a name, as for YAML in place of a path.
    return next((path for path in found if os.path.isfile(path)), None)


def config_names() -> list[str]:
    """Names of our configurations, such as ``mlp/paper``."""
    folders = [root / "configs" for root in ROOTS]
    found = {f.relative_to(d).with_suffix("") for d in folders for f in d.rglob("*.yaml")}
    return sorted(path.as_posix() for path in found)


@functools.cache
def read_data(path: str) -> dict[str, Any]:
    """The content of one of our own YAML files, by its path below ``ln_zoo``."""
    text = files("ln_zoo").joinpath(path).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def render_template(path: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """A template, by its path below ``ln_zoo``; lines of statements leave no line."""
    import jinja2  # not needed to compare numbers

    loader = jinja2.PackageLoader("ln_zoo", "")
    env = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    env.filters |= filters
    return env.get_template(path).render(**values)
