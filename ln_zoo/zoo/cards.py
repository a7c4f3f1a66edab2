"""Writing the card of a trained model: four files, of which the README follows from the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from torch import Tensor

from ln_zoo._version import __version__
from ln_zoo.models.base import ZooModule
from ln_zoo.utils.files import atomic_write_text
from ln_zoo.utils.training_runs import Run, read_runs
from ln_zoo.utils.yaml import parse_yaml
from ln_zoo.zoo import catalog, registry, reported, schema
from ln_zoo.zoo.errors import CardError
from ln_zoo.zoo.readme import render_card
from ln_zoo.zoo.schema import Must
from ln_zoo.zoo.source import IMPORT_IT, of_checkpoint


@dataclass(frozen=True)
class Facts:
    """What the author of a card states beside the measured values."""

    license: str = ""  #: default apache-2.0; ``other`` needs the name and the link
    license_name: str = ""  #: of another license
    license_link: str = ""  #: of another license
    language: str = ""  #: of the data
    description: str = ""  #: what the model does
    intended_use: str = ""  #: what the model is for
    limitations: list[str] = field(default_factory=list)  #: what it is not for
    uncertainty: str = ""  #: of the results, and its kind
    training_time: str = ""  #: duration and machine
    notes: list[str] = field(default_factory=list)  #: further remarks
    differences: list[str] = field(default_factory=list)  #: from the paper
    training_commands: list[str] = field(default_factory=list)  #: that train it again
    datasets: list[str] = field(default_factory=list)  #: ids on the hub
    tags: list[str] = field(default_factory=list)  #: for the hub
    main_metric: str = ""  #: the metric that goes first
    #: Further facts that decide whether numbers are comparable; see `ln_zoo.zoo.comparison`.
    size: dict[str, Any] = field(default_factory=dict)
    #: Captions by file; the files are copied into the folder.
    pictures: dict[str, str] = field(default_factory=dict)
    version: str = ""  #: of the weights, for ``revision`` of `ln_zoo.load`

    def stated(self) -> dict[str, Any]:
        """The facts that ``results.json`` stores under ``card``."""
        apart = ("main_metric", "size", "training_commands")
        given = {key: value for key, value in vars(self).items() if value and key not in apart}
        if self.pictures:
            given["pictures"] = {Path(file).name: text for file, text in self.pictures.items()}
        return given


_Scores = Annotated[dict[str, float], Must(bool, "the measured values")]
_Data = Annotated[dict[str, Any], Must(lambda data: "dataset" in data, "facts with 'dataset'")]
_Nothing = Annotated[Any, Must(lambda part: not part, "null: test without limit_test_batches")]


@dataclass(frozen=True)
class _TestResults:
    """What a card takes from ``test_results.json``; `ln_zoo.cli.scores` writes it."""

    model: str
    norm: str
    metrics: _Scores
    data: _Data
    preprocessing: dict[str, Any]
    command: str
    seed: int | None
    precision: str
    processes: int
    date: str
    hardware: str
    training_runs: list[Any]
    versions: dict[str, Any]
    checkpoint: str | None
    checkpoint_sha256: str | None = None
    population_statistics: dict[str, Any] | None = None
    optimization: dict[str, Any] | None = None
    part: _Nothing = None

    def evaluation(self) -> dict[str, Any]:
        """How the metrics were measured."""
        keys = ("command", "seed", "precision", "processes", "hardware", "date", "versions")
        population = self.population_statistics
        return {key: getattr(self, key) for key in keys} | (
            {"population_statistics": population} if population else {}
        )

    def training(self) -> dict[str, Any]:
        """Length and settings of the training."""
        stored = self.optimization or {}
        facts = {key: stored[key] for key in ("optimizer", "lr_scheduler") if stored.get(key)}
        if stored.get("lr_scheduler"):
            facts["lr_scheduler"] = stored["lr_scheduler"] | stored["lr_scheduler_config"]
        if rate := (stored.get("optimizer") or {}).get("init_args", {}).get("lr"):
            facts["lr"] = rate
        return training_facts(read_runs(self.training_runs)) | facts


def card_from_checkpoint(
    checkpoint: str | os.PathLike[str],
    results: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a card folder from a checkpoint and the results file of ``ln-zoo test`` on it.

    Args:
        checkpoint: a Lightning checkpoint of a model; read weights-only.
        results: ``test_results.json`` that ``ln-zoo test`` wrote for this checkpoint.
        out: the card folder to make.
        name: of the model; default: the name of the folder.
        facts: a YAML or JSON file, or a mapping, with any fields of `ln_zoo.zoo.Facts`.
        overwrite: whether an existing card may be replaced.

    Returns:
        The card folder.

    Raises:
        CardError: if a file is missing or unreadable, the checkpoint names a class of a module
            that is not imported, the results belong to another checkpoint, model or norm, a
            fact is unknown, or the folder must not be replaced.
    """
    path = Path(checkpoint)
    try:
        model = of_checkpoint(str(path), f"{IMPORT_IT}, or import it first in Python").load()
    except (OSError, ValueError) as error:
        raise CardError(str(error)) from error
    tested = _read_test_results(Path(results))
    found = {
        "checkpoint": path.name,
        "checkpoint_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "model": type(model).__name__,
        "norm": str(model.hparams["norm"]["class_path"]).rpartition(".")[2],
    }
    for key, value in found.items():
        stated = getattr(tested, key)
        if key == "checkpoint" and stated:
            stated = Path(stated).name
        if stated != value and (key, stated) != ("checkpoint_sha256", None):
            raise CardError(
                f"{results} was measured on {key} {stated!r}, {checkpoint} has {value!r}: run "
                f"ln-zoo test --ckpt_path {checkpoint} and give the file it writes"
            )
    return write_measured(
        out,
        model,
        tested.metrics,
        data=tested.data,
        preprocessing=tested.preprocessing,
        evaluation=tested.evaluation(),
        training=tested.training(),
        facts=facts,
        name=name,
        overwrite=overwrite,
    )


def training_facts(runs: Sequence[Run]) -> dict[str, Any]:
    """The training runs behind the weights, as a card stores them: the last, and ``earlier``."""
    if not runs:
        return {}
    *earlier, last = map(dict, runs)
    last.pop("weights", None)
    return last | ({"earlier": earlier} if earlier else {})


def write_measured(
    folder: str | os.PathLike[str],
    model: ZooModule,
    measured: Mapping[str, float],
    *,
    data: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    training: Mapping[str, Any],
    facts: str | os.PathLike[str] | Mapping[str, Any] | None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a card from measured metrics and the facts of its author."""
    given = _read_facts(facts)
    metrics = [_metric(name, value, data) for name, value in measured.items()]
    if main := given.main_metric:
        if main not in (known := [metric["name"] for metric in metrics]):
            raise CardError(f"main_metric {main!r} was not measured; measured are {known}")
        metrics.sort(key=lambda metric: metric["name"] != main)
    return write_card(
        folder,
        model,
        {
            "metrics": metrics,
            "evaluation": dict(evaluation),
            "training": {**training, "commands": given.training_commands},
            "size": given.size,
            "data": dict(data),
            "card": given.stated(),
        },
        preprocessing=preprocessing,
        name=name,
        files={Path(file).name: file for file in given.pictures},
        overwrite=overwrite,
    )


def write_card(
    folder: str | os.PathLike[str],
    model: ZooModule,
    results: Mapping[str, Any],
    *,
    preprocessing: Mapping[str, Any],
    name: str | None = None,
    files: Mapping[str, str | os.PathLike[str]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the four files of a card atomically: under a temporary name that is renamed at the end.

    Args:
        folder: the card folder to make.
        model: a model of the zoo; its weights are stored in float32, or in float16 if that is
            exact.
        results: plain values under ``metrics`` (a list of name, value, unit, dataset, split; the
            main one first), ``evaluation``, ``training``, ``size``, ``data`` (with ``dataset``) and
            ``card`` (see `Facts`; pictures are names among ``files``). Sizes, learning rate and the
            like are added from the model's arguments.
        preprocessing: of the data in training.
        name: of the model; default: the name of the folder.
        files: further files of the model, by name in the folder; their sha256 is stored and checked
            as for the weights. A vocabulary is added automatically.
        overwrite: whether an existing card may be replaced.

    Returns:
        The card folder.

    Raises:
        CardError: for a model that is not on `ln_zoo.models.ZooModule` or does not store its
            arguments, a name or value that cannot be stored, or a folder that must not be replaced.
    """
    path = Path(os.path.abspath(folder))
    name = path.name if name is None else name
    if not catalog.NAME.fullmatch(name):
        raise CardError(f"invalid model name {name!r}: use letters, digits, '.', '_' and '-' only")
    model_name = registry.model_name(type(model))
    registry.check_stored(model)
    init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    if "norm" in init_args:
        init_args["norm"] = registry.encode_norm(init_args["norm"])
    try:
        extra = {key: Path(source).read_bytes() for key, source in (files or {}).items()}
    except OSError as error:
        raise CardError(f"a file of the card cannot be read: {error}") from error
    for key in extra:
        if not catalog.is_plain_file_name(key) or key in catalog.CARD_FILES:
            raise CardError(f"a card cannot hold a further file called {key!r}")
    if isinstance(words := init_args.get("vocabulary"), list):
        init_args["vocabulary"] = catalog.VOCABULARY
        extra[catalog.VOCABULARY] = "".join(word + "\n" for word in words).encode()
    contents = {catalog.WEIGHTS: safetensors.torch.save(_weights(model)), **extra}
    config = {
        "format_version": catalog.FORMAT_VERSION,
        "name": name,
        "library": {"name": "ln_zoo", "version": __version__},
        "model": model_name,
        "init_args": init_args,
        "preprocessing": dict(preprocessing),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "files": {
            k: {"sha256": hashlib.sha256(v).hexdigest(), "size": len(v)}
            for k, v in contents.items()
        },
    }
    size = {**reported.model_size(model), **results["size"]}
    run = reported.run_size(size, results["data"])
    training = {k: run[k] for k in ("batch_size", "lr") if k in run} | dict(results["training"])
    stated = dict(results["card"])
    if registry.is_own(model_name):
        # The README must render without the user's class.
        stated["pipeline_tag"] = model.pipeline_tag
        stated["example"] = type(model).card_example(preprocessing)
    full = {
        "format_version": catalog.FORMAT_VERSION,
        **results,
        "size": size,
        "training": training,
        "card": stated,
    }
    _may_replace(path, {*catalog.CARD_FILES, *extra}, overwrite)

    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The catalogue ignores folders with a leading dot.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
            draft = Path(temporary) / path.name
            contents[catalog.CONFIG] = _json(config).encode()
            contents[catalog.RESULTS] = _json(full).encode()
            for key, content in contents.items():
                (draft / key).parent.mkdir(parents=True, exist_ok=True)
                (draft / key).write_bytes(content)
            (draft / catalog.README).write_text(render_card(draft), encoding="utf-8")
            _swap(draft, path)
    return path


def refresh(
    folder: str | os.PathLike[str],
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> None:
    """Regenerate a card's README from its ``config.json`` and ``results.json``.

    ``facts`` replace the author's facts in ``results.json``, as for `card_from_checkpoint`.
    """
    card = catalog.read_card(folder)
    with _writing(card.folder):
        if facts is not None:
            given, old = _read_facts(facts), card.results
            commands = given.training_commands or old.training.get("commands", [])
            of_class = {k: old.card[k] for k in ("pipeline_tag", "example") if k in old.card}
            training = {**old.training, "commands": commands}
            changed = {"training": training, "card": given.stated() | of_class}
            atomic_write_text(card.folder / catalog.RESULTS, _json(asdict(old) | changed))
        atomic_write_text(card.folder / catalog.README, render_card(folder))


# Reading what a card is made from


def _read_test_results(path: Path) -> _TestResults:
    value, known = _read_file(path), [f.name for f in fields(_TestResults)]
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k in known}
    return schema.read(_TestResults, value, f"{path}, which ln-zoo test writes")


def _read_facts(facts: str | os.PathLike[str] | Mapping[str, Any] | None) -> Facts:
    if facts is None or isinstance(facts, Mapping):
        found = schema.read(Facts, dict(facts or {}), "facts")
    else:
        found = schema.read(Facts, _read_file(Path(facts)), os.fspath(facts))
    if found.license == "other" and not (found.license_name and found.license_link):
        raise CardError("license other needs license_name and license_link, which the hub shows")
    return found


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise CardError(f"{path} cannot be read: there is no such file")
    try:
        return parse_yaml(str(path))  # JSON is YAML
    except ValueError as error:
        raise CardError(str(error)) from error


def _metric(name: str, value: float, data: Mapping[str, Any]) -> dict[str, Any]:
    bare = reported.bare_metric(name)
    known = reported.metric_unit(bare)
    dataset, split = reported.measured_on(data, metric=bare).rsplit("/", 1)
    unit = known.logged or known.unit
    return {"name": bare, "value": float(value), "unit": unit, "dataset": dataset, "split": split}


def _weights(model: ZooModule) -> dict[str, Tensor]:
    """The state dict for safetensors, in float32, or in float16 if that is exact for all."""
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    floats = [value.float() for value in state.values() if value.is_floating_point()]
    exact = all(torch.equal(value, value.half().float()) for value in floats)
    kind = torch.float16 if exact else torch.float32
    return {
        name: (value.to(kind) if value.is_floating_point() else value).contiguous().clone()
        for name, value in state.items()
    }


# Writing


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CardError(f"{path} cannot be written: {error}") from error


def _may_replace(path: Path, names: set[str], overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CardError(f"{path} is not a folder")
    there = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    if not there:
        return
    if not overwrite:
        raise CardError(
            f"{path} exists: allow it to be overwritten (--overwrite), or choose another folder"
        )
    if catalog.CONFIG not in there:
        raise CardError(f"{path} holds files and is not a card folder: choose another folder")
    if foreign := there - names:
        raise CardError(
            f"{path} holds {', '.join(sorted(foreign))}, which the new card would not: move them "
            "away, or pass them as files of the card"
        )


def _swap(draft: Path, path: Path) -> None:
    if not path.exists():
        draft.rename(path)
        return
    # Two renames: an interruption leaves the old or the new card complete under some name.
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
    path.replace(old)
    try:
        draft.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CardError(f"a card stores plain, finite values only: {error}") from error
