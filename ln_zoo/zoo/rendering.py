"""Markdown from the templates in ``templates/``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    """The templates; lines of statements leave no line in the output, and nothing is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ln_zoo.zoo"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_template(name: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """A template with its filters and values."""
    env = environment().overlay()
    env.filters = env.filters | filters
    return env.get_template(name).render(**values)
