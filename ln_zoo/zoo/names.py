"""Suggestions for misspelt names, and norms by name; torch is imported for a norm alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ln_zoo.norms import Norm


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known name, or "".

    Example:
        >>> nearest("LayrNorm", ["LayerNorm", "BatchNorm"])
        "; did you mean 'LayerNorm'?"
    """
    lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


def norm_class(name: str) -> type[Norm]:
    """The norm of that name in `ln_zoo.norms`, or of that class path."""
    from ln_zoo import norms

    if "." in name:
        return type(norms.from_config({"class_path": name}))
    classes = {key: value for key, value in vars(norms).items() if isinstance(value, type)}
    known = {k: c for k, c in classes.items() if issubclass(c, norms.Norm) and c is not norms.Norm}
    if name not in known:
        raise ValueError(
            f"no norm {name!r} in ln_zoo.norms{nearest(name, known)} ({', '.join(known)})"
        )
    return known[name]
