"""Options of a sweep as values: time, seeds, norms, settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.sweeps.grid import SweepError, is_file, norm_name
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config

#: Upper bound, more than a sweep can train.
_MAX_SEEDS = 10_000
#: Options that the sweep sets, and the options of the sweep for them.
_RESERVED = {
    "config": "--config",
    "seed_everything": "--seeds",
    "data.seed": "--seeds",
    "ckpt_path": "none: runs resume by themselves",
    "test_after_fit": "--test",
    "trainer.logger.save_dir": "--out",
    "trainer.logger.name": "--out",
    "trainer.logger.version": "--out",
}


def parse_time(text: str) -> int:
    """Seconds of ``HH:MM:SS``.

    Example:
        >>> parse_time("01:02:03")
        3723
    """
    found = re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", text)
    hours, minutes, seconds = map(int, found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise SweepError(f"--max_time takes HH:MM:SS, such as 00:09:30, got {text}")
    return total


def parse_seeds(text: str) -> list[int]:
    """A number of seeds, starting at 0, or a list of them.

    Example:
        >>> parse_seeds("3"), parse_seeds("7,8"), parse_seeds("7,")
        ([0, 1, 2], [7, 8], [7])
    """
    try:
        seeds = [int(part) for part in text.rstrip(",").split(",")]
    except ValueError:
        raise SweepError(
            f"--seeds takes a number of seeds, or a list such as 0,1,5 (one alone: 7,), got {text}"
        ) from None
    if "," not in text:
        if seeds[0] < 1:
            alone = ", or `0,` for seed 0 alone" if seeds[0] == 0 else ""
            raise SweepError(f"--seeds {text} gives no runs: give at least 1{alone}")
        if seeds[0] > _MAX_SEEDS:
            raise SweepError(f"--seeds must be at most {_MAX_SEEDS:,}, got {text}")
        seeds = list(range(seeds[0]))
    if min(seeds) < 0:
        raise SweepError(f"--seeds must be 0 or more, got {text}")
    _check_distinct("--seeds", [str(seed) for seed in seeds])
    return seeds


def parse_norms(text: str, configs: Sequence[str]) -> list[str]:
    """Resolves names of norms to files or classes.

    ``layer`` stands for ``norms/layer.yaml`` in the folder of a configuration or its parent, then
    for ``configs/norms/layer.yaml``, which ships with the package. A name that ends in .yaml is a
    file; a name with a capital or a dot is a class.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise SweepError("--norms names no norm: the grid is empty")
    found = [_find_norm(name, configs) for name in names]
    _check_distinct("--norms", [norm_name(norm) for norm in found])
    return found


def parse_settings(given: Sequence[str]) -> dict[str, list[str]]:
    """Values by option, from ``OPTION=V1,V2``; commas in brackets or quotes do not separate.

    Example:
        >>> parse_settings(["model.lr=2e-4,1e-3", "model.hidden_sizes=[8, 8],[16]"])
        {'model.lr': ['2e-4', '1e-3'], 'model.hidden_sizes': ['[8, 8]', '[16]']}
    """
    settings: dict[str, list[str]] = {}
    for text in given:
        option, equals, values = text.partition("=")
        option = option.lstrip("-")
        if not (equals and option):
            raise SweepError(f"--set takes OPTION=VALUE,VALUE such as model.lr=1e-3, got {text!r}")
        if option in settings:
            raise SweepError(f"--set {option} is given twice: put all its values in one")
        check_option(option)
        settings[option] = split_values(values)
        if not settings[option]:
            raise SweepError(f"--set {option} has no value: the grid is empty")
        _check_distinct(f"--set {option}", settings[option])
    return settings


def check_option(argument: str) -> None:
    """Raises SweepError for an option of ``fit`` that the sweep sets."""
    option = argument.lstrip("-").partition("=")[0]
    if option in _RESERVED:
        raise SweepError(f"--{option} is set by the sweep ({_RESERVED[option]})")


def _find_norm(name: str, configs: Sequence[str]) -> str:
    if is_file(name):
        if find_config(name) is None:
            raise SweepError(f"--norms: there is no file {name}")
        return name
    if "." in name or name[0].isupper():
        return name
    parents = [Path(config).parent for config in configs]
    folders = [d / "norms" for d in [*parents, *(p.parent for p in parents)]]
    folders.append(Path("configs/norms"))
    for folder in folders:
        if find_config(path := (folder / f"{name}.yaml").as_posix()):
            return path
    known = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    known |= {each.partition("/")[2] for each in config_names() if each.startswith("norms/")}
    raise SweepError(
        f"--norms: no norm {name!r}{nearest(name, known)} "
        f"({', '.join(sorted(known))}; or a .yaml file, or a class)"
    )


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets and quotes; drop empty parts."""
    parts, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text + ","):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[start:place].strip())
            start = place + 1
    if quote or depth:
        raise SweepError(f"--set: unmatched brackets or quotes in {text!r}")
    return [part for part in parts if part]


def _check_distinct(option: str, values: Sequence[str]) -> None:
    twice = sorted(value for value, count in Counter(values).items() if count > 1)
    if twice:
        raise SweepError(f"{option} has {', '.join(twice)} twice")
