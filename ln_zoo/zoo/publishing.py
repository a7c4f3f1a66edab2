"""Publishing models: the card of a trained model, its README, and the upload to the hub.

A card has four files, of which the README follows from the others: what the paper reports is looked
up in ``reported.yaml``, so nobody types a number. Each folder is exactly a repository of the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData
from torch import Tensor

from ln_zoo._version import __version__
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm, from_config
from ln_zoo.utils import schema
from ln_zoo.utils.errors import CardError, first_line
from ln_zoo.utils.files import atomic_write_text
from ln_zoo.utils.package_data import render_template
from ln_zoo.utils.schema import Must
from ln_zoo.utils.training_runs import UNKNOWN, TrainingRun, dataset_metadata, format_run, read_runs
from ln_zoo.utils.yaml import parse_yaml
from ln_zoo.zoo import catalog, loading, reading, reported
from ln_zoo.zoo.catalog import Card, Metric
from ln_zoo.zoo.loading import IMPORT_IT, of_checkpoint


@dataclass(frozen=True)
class Facts:
    """What the author of a card states beside the measured values."""

    license: str = ""  #: of the weights; `publish` needs one. ``other`` needs the name and the link
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
        reading.model_name(type(model))
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


def training_facts(runs: Sequence[TrainingRun]) -> dict[str, Any]:
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
    model_name = reading.model_name(type(model))
    reading.check_stored(model)
    init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    if "norm" in init_args:
        init_args["norm"] = reading.encode_norm(init_args["norm"])
    try:
        extra = {key: Path(source).read_bytes() for key, source in (files or {}).items()}
    except OSError as error:
        raise CardError(f"a file of the card cannot be read: {error}") from error
    for key in extra:
        if not catalog.is_plain_file_name(key) or key in catalog.CARD_FILES:
            raise CardError(f"a card cannot hold a further file called {key!r}")
    if isinstance(words := init_args.get("vocabulary"), list):
        text = "".join(word + "\n" for word in words)
        if text.splitlines() == words:  # not with an end of line among characters
            init_args["vocabulary"] = catalog.VOCABULARY
            extra[catalog.VOCABULARY] = text.encode()
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
    full = _completed(model, results, preprocessing)
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


def _completed(
    model: ZooModule, results: Mapping[str, Any], preprocessing: Mapping[str, Any]
) -> dict[str, Any]:
    """The results with what the model's arguments and class add to them."""
    size = {**reported.model_size(model), **results["size"]}
    run = reported.run_size(size, results["data"])
    training = {k: run[k] for k in ("batch_size", "lr") if k in run} | dict(results["training"])
    stated = dict(results["card"])
    if reading.is_own(reading.model_name(type(model))):
        # The README must render without the user's class.
        stated["pipeline_tag"] = model.pipeline_tag
        stated["example"] = type(model).card_example(preprocessing)
    completed = {"size": size, "training": training, "card": stated}
    return {"format_version": catalog.FORMAT_VERSION, **results, **completed}


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


def save(
    model: ZooModule,
    folder: str | os.PathLike[str],
    *,
    metrics: Mapping[str, float] | None = None,
    data: Any = None,
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Implementation of `ln_zoo.models.ZooModule.save_pretrained`."""
    origin: Card | None = model.__dict__.get("card")
    if origin is not None and metrics is None and data is None and _is_that(model, origin):
        if facts is not None:
            raise CardError(
                f"these are the weights of {origin.name}, whose card is kept unchanged: facts can "
                "be given only for weights that were trained or measured after loading"
            )
        files = {key: origin.folder / key for key in origin.config.files}
        files.pop(catalog.WEIGHTS)
        files.pop(catalog.VOCABULARY, None)  # it is in the model
        return write_card(
            folder,
            model,
            {k: v for k, v in asdict(origin.results).items() if k != "format_version"},
            preprocessing=origin.preprocessing,
            name=name,
            files=files,
            overwrite=overwrite,
        )
    if data is None or isinstance(data, Mapping):
        described = {"dataset": "unknown data", **(data or {})}
    else:
        described = dataset_metadata(data)
    kept = {} if origin is None else origin.preprocessing
    runs = model.training_runs
    if origin is not None and runs == origin.training_runs and not _is_that(model, origin):
        runs = (*runs, UNKNOWN)  # trained without a Trainer
    return write_measured(
        folder,
        model,
        {} if metrics is None else metrics,
        data=described,
        preprocessing=getattr(data, "preprocessing", kept),
        evaluation={"versions": {"torch": str(torch.__version__)}},
        training=training_facts(runs),
        facts=facts,
        name=name,
        overwrite=overwrite,
    )


def push(
    model: ZooModule,
    repo_id: str,
    **options: Any,
) -> Publication:
    """Implementation of `ln_zoo.models.ZooModule.push_to_hub`: options of `save` and `publish`."""
    names = ("metrics", "data", "facts", "name")
    saved = {name: options.pop(name) for name in names if name in options}
    with tempfile.TemporaryDirectory() as folder:
        name = saved.pop("name", None) or repo_id.rpartition("/")[2]
        path = save(model, Path(folder) / "card", name=name, **saved)
        return publish(
            str(path),
            repo_id,
            norm=from_config(norm) if (norm := model.hparams.get("norm")) else None,
            model=type(model),
            **options,
        )


def _is_that(model: ZooModule, card: Card) -> bool:
    """Whether a model still has the class, norm and weights of its card."""
    if card.model != reading.model_name(type(model)):
        return False
    norm = card.config.init_args.get("norm")
    if norm is not None:
        encoded = reading.encode_norm(model.hparams["norm"])
        # Cards of older versions have fewer arguments; the others have their defaults.
        known = {key: encoded["init_args"].get(key) for key in norm["init_args"]}
        if (encoded["class"], known) != (norm["class"], norm["init_args"]):
            return False
    state = model.state_dict()
    stored = reading.read_weights(card)
    return state.keys() == stored.keys() and all(
        value.shape == stored[key].shape and torch.equal(value.cpu(), stored[key].to(value.dtype))
        for key, value in state.items()
    )


#: Options of a test that name files of the machine, or how much was printed.
_LOCAL_OPTIONS = ("--ckpt_path", "--trainer.logger", "--trainer.enable_progress_bar")


def render_card(folder: str | os.PathLike[str]) -> str:
    """The README of a card folder: a function of its ``config.json`` and ``results.json``.

    Raises:
        CardError: if one of the two is damaged.
    """
    card = catalog.read_card(folder)
    facts, own = card.results.card, reading.is_own(card.model)
    rows, compared = _results(card)
    evaluation = dict(card.results.evaluation)
    if versions := evaluation.get("versions"):
        evaluation["versions"] = ", ".join(f"{key} {value}" for key, value in versions.items())
    command = evaluation.pop("command", None)
    if "seed" in evaluation:  # not that of the training
        evaluation = {"seed of the test" if k == "seed" else k: v for k, v in evaluation.items()}
    training = {k: v for k, v in card.results.training.items() if k not in ("commands", "earlier")}
    if time := facts.get("training_time"):
        training["time"] = time
    # Some metrics have other data.
    trained_on = str(card.training_runs[-1].get("dataset", card.results.data["dataset"]))
    sources = reported.cited_for(card.model, card.norm, trained_on)
    sources += [reported.citations()[row.reported.source] for row in compared if row.reported]
    default = f"`{card.model}` with `{card.norm}`, trained on {trained_on} by ln_zoo."
    return render_template(
        "zoo/templates/card.md.jinja",
        {"code": _code, "arguments": _arguments},
        card=card,
        facts=facts,
        front_matter=front_matter(card).to_yaml(),
        description=facts.get("description") or default,
        **_usage(card),
        rows=rows,
        has_errors=any("±" in measured for _, _, measured, *_ in rows),
        command=command and _published_command(command, card.name),
        evaluation=evaluation,
        class_path=card.model if own else f"ln_zoo.models.{card.model}",
        weights={"name": catalog.WEIGHTS, **vars(card.config.files[catalog.WEIGHTS])},
        training=training,
        earlier=[format_run(run) for run in reversed(card.training_runs[:-1])],
        commands=card.results.training.get("commands"),
        sources=list(dict.fromkeys(sources)),
    )


def front_matter(card: Card) -> ModelCardData:
    """What the hub indexes of a card: library, licence, data, tags, and each metric's raw value."""
    stated = card.results.card
    datasets = stated.get("datasets", [])
    tags = ["layer-normalization", "pytorch-lightning", card.model, card.norm]
    own = reading.is_own(card.model)
    task = stated["pipeline_tag"] if own else reading.model_class(card.model).pipeline_tag
    return ModelCardData(
        library_name="ln-zoo",
        pipeline_tag=None if task == "other" else task,
        license=stated.get("license"),
        license_name=stated.get("license_name"),
        license_link=stated.get("license_link"),
        language=stated.get("language"),
        # Ids of the hub only: the page links to them.
        datasets=datasets or None,
        metrics=[metric.name for metric in card.metrics] or None,
        tags=[tag for tag in [*tags, *stated.get("tags", [])] if tag],
        model_name=card.name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=datasets[0] if len(datasets) == 1 else metric.dataset,
                dataset_name=metric.dataset,
                dataset_split=metric.split,
                metric_type=metric.name,
                metric_name=f"{metric.name} ({metric.unit})" if metric.unit else metric.name,
                metric_value=metric.value,
            )
            for metric in card.metrics
        ],
    )


def _code(value: Any) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _arguments(norm: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in norm["init_args"].items())


def _usage(card: Card) -> dict[str, Any]:
    """Imports, arguments of `load` and the example."""
    arguments, imports = [f'"{card.name}"'], []
    if reading.is_own(card.model):
        module, _, name = card.model.rpartition(".")
        arguments.append(f"model={name}")
        imports.append((module, name))
        example = card.results.card["example"]
    else:
        example = reading.model_class(card.model).card_example(card.preprocessing)
    if reading.is_own(card.norm):
        module, _, name = card.norm.rpartition(".")
        arguments.append(f"norm={name}({_arguments(card.config.init_args['norm'])})")
        imports.append((module, name))
    return {"imports": imports, "arguments": ", ".join(arguments), "example": example}


def _results(card: Card) -> tuple[list[list[str]], list[reported.Row]]:
    """Rows of the table, heads first, and the comparisons behind them."""
    results = card.results
    size = reported.run_size(results.size, results.data, card.training_runs)
    compared = [
        (metric, row)
        for metric in card.metrics
        for row in reported.comparison(
            card.model,
            card.norm,
            {metric.name: metric.value},
            data=f"{metric.dataset}/{metric.split}",
            size=size,
        )
    ]
    numbers = any(row.reported for _, row in compared)
    rows = [["metric", "split", "measured", *(["reported", "difference"] if numbers else [])]]
    for metric, row in compared:
        name, measured, *beside = row.cells()
        measured += _binomial_error(metric, results.data.get("test_size"))
        split = f"{metric.dataset}, {metric.split}"
        rows.append([name, split, measured, *(beside if numbers else [])])
    return rows if compared else [], [row for _, row in compared]


def _binomial_error(metric: Metric, test_size: int | None) -> str:
    """The standard error of a fraction of examples, in per cent; empty for any other metric."""
    is_fraction = metric.unit == "fraction"
    examples = reported.metric_unit(metric.name).examples or (test_size if is_fraction else None)
    share = metric.value if is_fraction else metric.value / 100
    if not examples or not 0 < share < 1:
        return ""
    return f" ± {100 * (share * (1 - share) / examples) ** 0.5:.2g}"


def _published_command(command: str, name: str) -> str:
    """The command of a test with published weights in place of a local checkpoint."""
    kept = []
    arguments = iter(shlex.split(command))
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option in _LOCAL_OPTIONS:
            if not equals:
                next(arguments, None)
            if option == "--ckpt_path":
                kept += ["--weights", name]
            continue
        kept.append(argument)
    return shlex.join(kept)


@dataclass(frozen=True)
class Publication:
    """Result of `publish`."""

    url: str  #: of the repository, or of the commit once there is one
    files: dict[str, int]  #: names and sizes in bytes
    commit: str | None  #: its hash; None after a dry run


def publish(
    name: str,
    repo_id: str,
    *,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    token: str | None = None,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Upload a card folder to the hub after loading and checking the model.

    Sends exactly the card's files in one commit, to ``HF_ENDPOINT`` or huggingface.co.

    Args:
        name: of a published model on this machine, or its folder.
        repo_id: ``user/repo``; the repository is made if it does not exist.
        norm: the normalisation of the model, if it is not one of ln_zoo's own (see `ln_zoo.load`).
        model: class of the model, likewise.
        token: of the hub; default: the one stored by ``hf auth login``, or ``HF_TOKEN``.
        private: whether a repository made here is private.
        revision: branch to send to, made if it does not exist; default ``main``.
        dry_run: check everything and send nothing.

    Raises:
        CardError: if the card is damaged, states no license, its README is outdated, or the hub
            refuses.
    """
    card: Card = loading.load(name, norm=norm, model=model).__dict__["card"]
    readme = card.folder / catalog.README
    if not readme.is_file() or readme.read_text(encoding="utf-8") != render_card(card.folder):
        raise CardError(
            f"{readme} was edited, or is older than {catalog.CONFIG} and {catalog.RESULTS}: "
            f"regenerate it with `ln-zoo cards {card.folder} --refresh`; text belongs in the facts "
            "of the card"
        )
    if not card.results.card.get("license"):
        raise CardError(
            f"{card.name} states no license of its weights: write `license: ...` into a file and "
            f"run `ln-zoo cards {card.folder} --refresh --facts FILE`"
        )
    names = sorted({*catalog.CARD_FILES, *card.config.files})
    files = {name: card.path(name).stat().st_size for name in names}
    api = HfApi(token=token)
    if dry_run:
        return Publication(f"{api.endpoint}/{repo_id}", files, None)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id=repo_id,
            # One by one: the weights may lie in another folder.
            operations=[CommitOperationAdd(name, card.path(name)) for name in names],
            revision=revision,
            commit_message=f"{card.name}, written by ln_zoo",
        )
    except Exception as error:
        # Which classes a lost connection raises depends on the version of the hub's client.
        raise CardError(f"{card.name} not published as {repo_id!r}: {first_line(error)}") from error
    return Publication(commit.commit_url, files, commit.oid)
