"""The grid of a sweep: its runs, their names and their arguments."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ln_zoo._version import __version__
from ln_zoo.utils.files import atomic_write_text, check_output_folder
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config
from ln_zoo.utils.yaml import parse_yaml

MANIFEST = "sweep.json"
#: Version 1 has digests of configurations in place of their contents.
_FORMAT_VERSION = 2
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


class SweepError(ValueError):
    """An invalid request for a sweep."""

    exit_code = 2


@dataclass(frozen=True)
class Run:
    """One run of a grid."""

    norm: str  # item of `--norms`
    settings: Mapping[str, str]  # values by option of `--set`
    seed: int  # of weights, noise and the order of the data
    name: str  # folder of the run, relative to the sweep's
    trial: tuple[str, int] | None = None  # of a search: its norm, and its number in the study

    @property
    def label(self) -> str:
        """Name of the runs of all seeds: ``"layer, model.lr=2e-4"``."""
        return ", ".join([norm_name(self.norm), *_assignments(self.settings)])


@dataclass(frozen=True)
class Grid:
    """A sweep, as stored in ``sweep.json``: what its runs need, beside the code and the data."""

    configs: list[str]  # configuration files that all runs share
    norms: list[str]  # files or classes
    seeds: list[int]  # of weights, noise and the order of the data
    settings: dict[str, list[str]] = field(default_factory=dict)  # values by option
    options: list[str] = field(default_factory=list)
    test: str = "last"
    threads: int = 0
    data_seed: bool = True  # whether the data module has a seed
    contents: dict[str, str] = field(default_factory=dict)  # YAML by configuration and norm
    version: str = __version__  # of ln_zoo, when the sweep was begun
    data: str = ""  # checksum of the data's files, if there are any
    modules: dict[str, list[str]] = field(default_factory=dict)  # folders by module of the user's
    search: dict[str, Any] = field(default_factory=dict)  # sampler, pruner, trials of each norm
    trials: list[dict[str, Any]] = field(default_factory=list)  # norm, number and settings
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 by file, without its content
    callback: bool = False  # whether `Normalize` gives the model its norm

    def runs(self) -> list[Run]:
        """All runs; all labels with one seed come before the next seed."""
        found: list[tuple[str, dict[str, str], tuple[str, int] | None]] = []
        for norm, values in product(self.norms, product(*self.settings.values())):
            found.append((norm, dict(zip(self.settings, values, strict=True)), None))
        if self.search:
            found = [(x["norm"], x["settings"], (x["norm"], x["number"])) for x in self.trials]
        folders = [folder_name(norm, settings) for norm, settings, _ in found]
        return [
            Run(norm, settings, seed, f"{folder}/seed_{seed}", trial)
            for seed in self.seeds
            for folder, (norm, settings, trial) in zip(folders, found, strict=True)
        ]

    def labels(self) -> list[str]:
        """Unique labels, in order."""
        return list(dict.fromkeys(run.label for run in self.runs()))

    def arguments(self, run: Run) -> list[str]:
        """Arguments of ``ln-zoo fit`` and ``test`` for a run, without its output folder."""
        seeds = ["--seed_everything", "--data.seed"][: 1 + self.data_seed]
        return [
            *(f"--config={self.configuration(path)}" for path in self.configs),
            # Before the settings, which may override the norm's arguments.
            *self._norm_arguments(run.norm),
            *self.options,
            *(f"--{option}={value}" for option, value in run.settings.items()),
            *(f"{option}={run.seed}" for option in seeds),
        ]

    def _norm_arguments(self, norm: str) -> list[str]:
        config = self.configuration(norm)
        if not self.callback:
            return [f"--config={config}"]
        found = parse_yaml(_text(config) or config)["model"]["init_args"]["norm"]
        normalize = {"class_path": "ln_zoo.callbacks.Normalize", "init_args": {"norm": found}}
        return [f"--trainer.callbacks+={json.dumps(normalize)}"]

    def configuration(self, name: str) -> str:
        """The name of a file if it is here and unchanged, otherwise the content."""
        content = self.contents.get(name)
        if name in self.configs or _is_file(name):
            return name if content is None or _text(name) == content else content
        return content or _class_config(name)

    def changed(self) -> list[str]:
        """Configuration files here that differ from the sweep's; missing ones do not count."""
        return [
            name
            for name, digest in self.all_digests().items()
            if (name in self.configs or _is_file(name))
            and (text := _text(name)) is not None
            and _digest(text) != digest
        ]

    def all_digests(self) -> dict[str, str]:
        """SHA-256 of each configuration and norm."""
        return self.digests | {name: _digest(text) for name, text in self.contents.items()}

    def find_modules(self, out: Path) -> None:
        """Add the folders of the user's own modules to ``sys.path``, last.

        A folder is first looked for at its place relative to the sweep's, then at its own.
        """
        for module, folders in self.modules.items():
            for folder in folders:
                place = os.path.normpath(out.absolute() / folder)
                if Path(place, module).is_dir() or Path(place, f"{module}.py").exists():
                    if place not in sys.path:
                        sys.path.append(place)
                    break


# Parsing


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


def folder_name(norm: str, settings: Mapping[str, str]) -> str:
    """The folder of a label: readable and unique."""
    whole = "-".join([norm_name(norm), *_assignments(settings)])
    # Without "=", which separates label and folder in `ln-zoo compare`.
    name = re.sub(r"[^\w.+-]+", "_", whole.replace("=", "-")).strip("._")
    if name != whole.replace("=", "-") or len(name) > 100 or whole.count("=") > len(settings):
        name = f"{name[:100]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return name


def norm_name(norm: str) -> str:
    """Name of a norm: ``"layer"`` for its file, ``"LayerNorm"`` for its class; no norm: none."""
    name = Path(norm).stem if _is_file(norm) else norm.rpartition(".")[2]
    return "none" if name == "Identity" else name


# The file


def contents_of(configs: Sequence[str], norms: Sequence[str]) -> dict[str, str]:
    """YAML of the configurations and norms of a grid, by name; SweepError if one cannot be read."""
    found = {}
    for name in (*configs, *norms):
        is_class = name not in configs and not _is_file(name)
        text = _class_config(name) if is_class else _text(name)
        if text is None:
            raise SweepError(f"{name} cannot be read: give a YAML file")
        found[name] = text
    return found


def read_grid(folder: Path) -> Grid | None:
    """The grid in a sweep's folder, or None."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SweepError(f"{path} cannot be read ({error}): choose another --out") from error
    try:
        if content.pop("format_version") not in (1, _FORMAT_VERSION):
            raise SweepError(f"{path} was written by a newer version of ln_zoo")
        return Grid(**content)
    except (AttributeError, KeyError, TypeError) as error:
        raise SweepError(f"{path} was not written by ln-zoo sweep: choose another --out") from error


def existing_grid(folder: Path) -> Grid:
    """The grid in a sweep's folder; SweepError if there is none."""
    if (grid := read_grid(folder)) is None:
        raise SweepError(f"there is no sweep in {folder}")
    return grid


def make_folder(folder: Path) -> None:
    """Create a folder of a sweep; SweepError unless it can be written to."""
    try:
        check_output_folder(folder, "make it writable, or choose another with --out")
    except OSError as error:
        raise SweepError(str(error)) from error


def write_grid(grid: Grid, folder: Path) -> None:
    """Atomically write a grid to its folder."""
    content = {"format_version": _FORMAT_VERSION} | asdict(grid)
    atomic_write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def check_extends(new: Grid, old: Grid, folder: Path) -> None:
    """Raises SweepError unless the new grid contains all runs of the old one.

    Norms, seeds and values may be added; finished runs stay valid.
    """
    differing = []
    was: Any
    now: Any
    for name in ("configs", "options", "test", "threads"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            differing.append(f"{name} {_shown(was)} there, {_shown(now)} here")
    for name in ("sampler", "pruner"):
        was, now = old.search.get(name, "none"), new.search.get(name, "none")
        if was != now:
            differing.append(f"--{name} {was} there, {now} here")
    if list(old.settings) != list(new.settings):
        was, now = list(old.settings), list(new.settings)
        differing.append(f"--set of {_shown(was)} there, of {_shown(now)} here")
    kept: dict[str, tuple[list[Any], list[Any]]]
    kept = {"norms": (old.norms, new.norms), "seeds": (old.seeds, new.seeds)}
    kept |= {f"--set {k}": (v, new.settings.get(k, v)) for k, v in old.settings.items()}
    for name, (was, now) in kept.items():
        if missing := [value for value in was if value not in now]:
            differing.append(f"{name} {_shown(missing)} only there")
    digests = new.all_digests()
    for name, digest in old.all_digests().items():
        if digests.get(name, digest) != digest:
            differing.append(f"{name} has changed since")
    if differing:
        raise SweepError(
            f"{folder} holds another sweep ({'; '.join(differing)}): choose another --out. More "
            "norms, seeds and values may be added to it"
        )


def _assignments(settings: Mapping[str, str]) -> Iterator[str]:
    return (f"{option}={value}" for option, value in settings.items())


def _is_file(norm: str) -> bool:
    return norm.endswith((".yaml", ".yml"))


def _class_config(norm: str) -> str:
    """All fields of a class with its defaults, so that no argument of another norm remains."""
    from ln_zoo.norms import to_config
    from ln_zoo.norms.config import norm_class

    try:
        config = to_config(norm_class(norm)())
    except (ImportError, TypeError, ValueError) as error:
        raise SweepError(f"--norms {norm}: {error}") from error
    return json.dumps({"model": {"init_args": {"norm": config}}})


def _text(path: str) -> str | None:
    try:
        return (find_config(path) or Path(path)).read_bytes().decode()
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _find_norm(name: str, configs: Sequence[str]) -> str:
    if _is_file(name):
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


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return str(value)
