"""Data files of the package, and Markdown from its templates; both by path below ``ln_zoo``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import yaml


@functools.cache
def read_data(path: str) -> dict[str, Any]:
    """The content of one of our own YAML files."""
    text = files("ln_zoo").joinpath(path).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def render_template(path: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """A template with its filters and values; lines of statements leave no line."""
    import jinja2  # not needed to compare numbers

    loader = jinja2.PackageLoader("ln_zoo", "")
    env = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    env.filters |= filters
    return env.get_template(path).render(**values)
