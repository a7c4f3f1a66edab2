"""The grid of a sweep: its runs, their names and their arguments."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ln_zoo._version import __version__
from ln_zoo.utils.package_data import find_config
from ln_zoo.utils.yaml import parse_yaml


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
    paths: list[str] = field(default_factory=list)  # relative ones of the user's files
    folders: list[str] = field(default_factory=list)  # where they are, see `in_own_folder`
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
        if name in self.configs or is_file(name):
            return name if content is None or _text(name) == content else content
        return content or _class_config(name)

    def changed(self) -> list[str]:
        """Configuration files here that differ from the sweep's; missing ones do not count."""
        return [
            name
            for name, digest in self.all_digests().items()
            if (name in self.configs or is_file(name))
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

    @contextlib.contextmanager
    def in_own_folder(self, out: Path) -> Iterator[Path]:
        """Change to the folder of the files that relative paths name; yields ``out`` from there.

        The folder is first looked for at its place relative to the sweep's, then at its own. If
        neither has the files, the current folder stays.
        """
        places = [os.path.normpath(out.absolute() / folder) for folder in self.folders]
        found = {
            place: sum(os.path.exists(os.path.join(place, path)) for path in self.paths)
            for place in (*places, os.getcwd())
        }
        place = max(found, key=lambda place: found[place])
        if not found[place] or place == os.getcwd():
            yield out
            return
        if data := os.environ.get("LN_ZOO_DATA"):
            os.environ["LN_ZOO_DATA"] = os.path.abspath(data)
        print(f"note: the current folder is {place}, which has the sweep's files", file=sys.stderr)
        out = out.absolute()
        with contextlib.chdir(place):
            yield out


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
    name = Path(norm).stem if is_file(norm) else norm.rpartition(".")[2]
    return "none" if name == "Identity" else name


def contents_of(configs: Sequence[str], norms: Sequence[str]) -> dict[str, str]:
    """YAML of the configurations and norms of a grid, by name; SweepError if one cannot be read."""
    found = {}
    for name in (*configs, *norms):
        is_class = name not in configs and not is_file(name)
        text = _class_config(name) if is_class else _text(name)
        if text is None:
            raise SweepError(f"{name} cannot be read: give a YAML file")
        found[name] = text
    return found


def _assignments(settings: Mapping[str, str]) -> Iterator[str]:
    return (f"{option}={value}" for option, value in settings.items())


def is_file(norm: str) -> bool:
    """Whether a norm is named by its file, not by its class."""
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
