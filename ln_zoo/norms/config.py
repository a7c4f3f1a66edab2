"""Norms as plain data, for YAML, checkpoints and model cards."""

from __future__ import annotations

import dataclasses
from typing import Any

from ln_zoo.norms.base import Norm
from ln_zoo.utils.class_paths import class_path, import_path
from ln_zoo.utils.names import nearest


def to_config(norm: Norm) -> dict[str, Any]:
    """The norm as ``{"class_path": ..., "init_args": {...}}`` of plain values.

    Raises:
        TypeError: if the norm is not a dataclass.

    Example:
        >>> from ln_zoo.norms import RMSNorm
        >>> to_config(RMSNorm(eps=0.001))
        {'class_path': 'ln_zoo.norms.RMSNorm',
         'init_args': {'gain': 1.0, 'eps': 0.001, 'per_block': False}}
    """
    cls = type(norm)
    if not dataclasses.is_dataclass(norm):
        raise TypeError(
            f"{cls.__qualname__} cannot be stored: make it a frozen dataclass "
            "(@dataclass(frozen=True))"
        )
    init_args = {f.name: getattr(norm, f.name) for f in dataclasses.fields(norm) if f.init}
    return {"class_path": class_path(cls), "init_args": init_args}


def from_config(config: Norm | dict[str, Any]) -> Norm:
    """Inverse of `to_config`; a norm is returned unchanged.

    It imports the class path: use it on your own files and checkpoints only.

    Raises:
        ValueError: if the path is not a norm's, or arguments do not fit.
    """
    if isinstance(config, Norm):
        return config
    if not (isinstance(config, dict) and isinstance(config.get("class_path"), str)):
        raise ValueError(f"expected a norm or a dict with 'class_path', got {config!r}")
    try:
        cls = import_path(config["class_path"])
    except ImportError as error:
        raise ValueError(
            f"norm {error}; is the file that defines it on the Python path?"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Norm)):
        raise ValueError(f"{config['class_path']!r} is not a subclass of ln_zoo.norms.Norm")
    try:
        return cls(**config.get("init_args", {}))
    except TypeError as error:
        raise ValueError(f"{config['class_path']}: {error}") from error


def norm_class(name: str) -> type[Norm]:
    """The norm of that name in `ln_zoo.norms`, or of that class path; ValueError if unknown."""
    if "." in name:
        return type(from_config({"class_path": name}))
    found = Norm.__subclasses__()
    for cls in found:
        found += cls.__subclasses__()
    known = {c.__name__: c for c in found if c.__module__.startswith("ln_zoo.norms.")}
    if name not in known:
        raise ValueError(
            f"no norm {name!r} in ln_zoo.norms{nearest(name, known)} ({', '.join(known)})"
        )
    return known[name]
