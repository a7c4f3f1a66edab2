"""Writing the card of a trained model: four files, of which the README follows from the others.

``config.json`` and ``results.json`` hold every fact once. The README is rendered from them, with
what the paper reports looked up in ``reported.yaml``; so nobody types a number.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import EvalResult, ModelCardData
from torch import Tensor

from ln_zoo._version import __version__
from ln_zoo.files import write_whole
from ln_zoo.models.base import ZooModule
from ln_zoo.training_runs import Run, in_words, read_runs
from ln_zoo.zoo import catalog, registry, reported
from ln_zoo.zoo.catalog import Card, CardError
from ln_zoo.zoo.source import IMPORT_IT, of_checkpoint
from ln_zoo.zoo.strict_yaml import parse_yaml

# What the author of a card may state beside the measured facts.
_FACTS: dict[str, Any] = {
    "license": str,
    "license_name": str,
    "license_link": str,
    "language": str,
    "description": str,
    "intended_use": str,
    "limitations": list,
    "uncertainty": str,
    "training_time": str,
    "notes": list,
    "differences": list,
    "training_commands": list,
    "datasets": list,
    "tags": list,
    "main_metric": str,
    "size": dict,
    "pictures": dict,
    "version": str,
}

_TEST_RESULTS: dict[str, Any] = {
    "model": str,
    "norm": str,
    "metrics": dict,
    "data": dict,
    "preprocessing": dict,
    "command": str,
    "seed": (int, type(None)),
    "precision": str,
    "processes": int,
    "date": str,
    "hardware": str,
    "training_runs": list,
    "versions": dict,
    "checkpoint": str,
}
# Of these, what describes the test run itself.
_EVALUATION = ("command", "seed", "precision", "processes", "hardware", "date", "versions")
# What only some test runs have to say: how statistics of the population were taken.
_SOMETIMES = {"population_statistics": dict}
# What only runs with another optimizer or a schedule say of their training.
_TRAINED = {"optimization": dict}


def card_from_checkpoint(
    checkpoint: str | os.PathLike[str],
    results: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a card folder from a checkpoint and the results file of ``ln-zoo test`` on it.

    Args:
        checkpoint: a Lightning checkpoint of one of the zoo's models; read weights-only.
        results: ``test_results.json`` that ``ln-zoo test`` wrote for this very checkpoint.
        out: the card folder to make.
        name: of the model; default: that of the folder.
        facts: what no measurement knows, a YAML or JSON file or a mapping with any of: ``license``
            (default apache-2.0; ``other`` needs ``license_name`` and ``license_link``),
            ``description``, ``intended_use``, ``uncertainty`` (of the results, and its kind),
            ``training_time``, ``language``: text; ``limitations``, ``notes``, ``differences``
            (from the paper), ``training_commands``, ``datasets`` (hub ids), ``tags``: lists of
            text;
            ``main_metric``: which metric goes first; ``pictures``: files, each with the words under
            it, which are copied into the folder and shown; ``version``: what these weights are
            called among others of the same name, which `ln_zoo.load` takes as ``revision``;
            ``size``: further facts that decide whether numbers are comparable (see
            `ln_zoo.zoo.reported.comparison`).
        overwrite: whether a card that is there may be replaced.

    Returns:
        The card folder.

    Raises:
        CardError: if a file is missing or unreadable, the checkpoint names a norm of a module
            that is not imported, the results belong to another checkpoint, model or norm, a
            fact is unknown, or the folder must not be replaced.
    """
    model = _model_from_checkpoint(Path(checkpoint))
    tested = _read_test_results(Path(results))
    path = Path(checkpoint)
    if Path(tested["checkpoint"]).name != path.name:
        raise CardError(
            f"{results} was measured on {tested['checkpoint']!r}, not on {path.name!r}: run "
            f"ln-zoo test --ckpt_path {checkpoint} and give the file it writes"
        )
    digest = tested.get("checkpoint_sha256")
    if digest is not None and digest != _sha256(path.read_bytes()):
        raise CardError(
            f"{results} was measured on another {path.name!r} than {checkpoint} (sha256 differs): "
            f"run ln-zoo test --ckpt_path {checkpoint} again"
        )
    is_model, is_norm = type(model).__name__, _short_norm(model)
    if (tested["model"], tested["norm"]) != (is_model, is_norm):
        raise CardError(
            f"{results} is for {tested['model']} with {tested['norm']}, {checkpoint} holds "
            f"{is_model} with {is_norm}"
        )
    return write_measured(
        out,
        model,
        tested["metrics"],
        data=tested["data"],
        preprocessing=tested["preprocessing"],
        evaluation={
            **{key: tested[key] for key in _EVALUATION},
            **{key: tested[key] for key in _SOMETIMES if tested.get(key) is not None},
        },
        training={
            **training_facts(read_runs(tested["training_runs"])),
            **_optimization(tested.get("optimization")),
        },
        facts=facts,
        name=name,
        overwrite=overwrite,
    )


def training_facts(runs: Sequence[Run]) -> dict[str, Any]:
    """What a card says of the runs of training behind its weights: the last, and those before.

    Example:
        >>> training_facts([{"epochs": 15, "weights": "mlp.none"}, {"epochs": 5}])
        {'epochs': 5, 'earlier': [{'epochs': 15, 'weights': 'mlp.none'}]}
    """
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
    """Writes a card from metrics by name and from what its author states.

    Args:
        folder: the card folder to make.
        model: to store.
        measured: metrics as ``Trainer.test`` returns them; none: nothing was measured.
        data: facts of the data, ``dataset`` among them.
        preprocessing: what was done to the data before the model saw it.
        evaluation: how the metrics were measured.
        training: length and settings of the training.
        facts: of the author, as for `card_from_checkpoint`.
        name: of the model; default: that of the folder.
        overwrite: whether a card that is there may be replaced.

    Raises:
        CardError: as `write_card`, or for an unknown fact.
    """
    stated = _read_facts(facts)
    pictures = {Path(file).name: file for file in stated.get("pictures", {})}
    if pictures:
        stated["pictures"] = {Path(file).name: text for file, text in stated["pictures"].items()}
    metrics = _metrics(measured, data)
    if main := stated.pop("main_metric", None):
        if main not in (known := [metric["name"] for metric in metrics]):
            raise CardError(f"main_metric {main!r} was not measured; measured are {known}")
        metrics.sort(key=lambda metric: metric["name"] != main)
    return write_card(
        folder,
        model,
        {
            "metrics": metrics,
            "evaluation": dict(evaluation),
            "training": {**training, "commands": stated.pop("training_commands", [])},
            "size": stated.pop("size", {}),
            "data": dict(data),
            "card": stated,
        },
        preprocessing=preprocessing,
        name=name,
        files=pictures,
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
    """Writes the four files of a card, all or none of them.

    The folder is made under a temporary name beside its place and renamed at the end, so that an
    interruption leaves no half card behind.

    Args:
        folder: the card folder to make.
        model: a model of the zoo; its weights are stored in float32, or in float16 where that is
            exact.
        results: what was measured and how, with the keys ``metrics`` (a list of name, value, unit,
            dataset, split; the main one first), ``evaluation``, ``training``, ``size``, ``data``
            and ``card`` (license, description, notes, differences, datasets, tags, and pictures:
            names among ``files`` and the words under them), all plain.
            ``data`` names its ``dataset``.
            Sizes, learning rate and the like are added from the model's own arguments.
        preprocessing: what was done to the data before the model saw it.
        name: of the model; default: that of the folder.
        files: further files that belong to the model: name in the folder and source. Their sha256
            is stored and checked like that of the weights. The words of a model that reads text are
            such a file by themselves.
        overwrite: whether a card that is there may be replaced.

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
    hparams = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    init_args = dict(hparams)
    if "norm" in init_args:
        init_args["norm"] = registry.encode_norm(init_args["norm"])
    try:
        extra = {key: Path(source).read_bytes() for key, source in (files or {}).items()}
    except OSError as error:
        raise CardError(f"a file of the card cannot be read: {error}") from error
    for key in extra:
        if not catalog.is_plain_file_name(key) or key in catalog.CARD_FILES:
            raise CardError(f"a card cannot hold a further file called {key!r}")
    size = {**hparams, **results["size"]}
    size.pop("norm", None)
    if isinstance(words := init_args.get("vocabulary"), list):
        init_args["vocabulary"] = catalog.VOCABULARY
        extra[catalog.VOCABULARY] = "".join(word + "\n" for word in words).encode()
        del size["vocabulary"]
        size["vocab_size"] = model.vocabulary.size
    contents = {catalog.WEIGHTS: safetensors.torch.save(_weights(model)), **extra}
    config = {
        "format_version": catalog.FORMAT_VERSION,
        "name": name,
        "library": {"name": "ln_zoo", "version": __version__},
        "model": model_name,
        "init_args": init_args,
        "preprocessing": dict(preprocessing),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "files": {k: {"sha256": _sha256(v), "size": len(v)} for k, v in contents.items()},
    }
    run = reported.run_size(size, results["data"])
    training = {k: run[k] for k in ("batch_size", "lr") if k in run} | dict(results["training"])
    stated = dict(results["card"])
    if registry.is_own(model_name):
        # The README is a function of the files: who renders it may not have the class.
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

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The leading dot keeps a card that is being written out of the catalogue.
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise CardError(f"{path} cannot be written: {error}") from error
    try:
        draft.chmod(0o755)
        for key, content in contents.items():
            (draft / key).parent.mkdir(parents=True, exist_ok=True)
            (draft / key).write_bytes(content)
        (draft / catalog.CONFIG).write_text(_json(config), encoding="utf-8")
        (draft / catalog.RESULTS).write_text(_json(full), encoding="utf-8")
        (draft / catalog.README).write_text(render_card(draft), encoding="utf-8")
        _swap(draft, path)
    except OSError as error:
        raise CardError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def refresh(
    folder: str | os.PathLike[str],
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> None:
    """Writes a card's README anew from its ``config.json`` and ``results.json``.

    Args:
        folder: of the card; its weights and what was measured stay as they are.
        facts: of its author, in place of those in ``results.json``; as for `card_from_checkpoint`.

    Raises:
        CardError: if one of the two is damaged, or a fact is unknown.
    """
    card = catalog.read_card(folder)
    if facts is not None:
        stated = _read_facts(facts)
        if pictures := stated.get("pictures"):
            stated["pictures"] = {Path(file).name: text for file, text in pictures.items()}
        training = {**card.results["training"]}
        training["commands"] = stated.pop("training_commands", training.get("commands", []))
        for key in ("main_metric", "size"):  # they are about what was measured
            stated.pop(key, None)
        of_class = {key: card.results["card"].get(key) for key in ("pipeline_tag", "example")}
        stated |= {key: value for key, value in of_class.items() if value is not None}
        results = {**card.results, "training": training, "card": stated}
        _replace(card.folder / catalog.RESULTS, _json(results))
    _replace(card.folder / catalog.README, render_card(folder))


def _replace(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise CardError(f"{path} cannot be written: {error}") from error


def render_card(folder: str | os.PathLike[str]) -> str:
    """The README of a card folder: a function of its ``config.json`` and ``results.json``.

    Raises:
        CardError: if one of the two is damaged.
    """
    card = catalog.read_card(folder)
    stated = card.results["card"]
    parts = [
        f"---\n{front_matter(card).to_yaml()}\n---",
        f"# {card.name}",
        _description(card),
        _pictures_part(card),
        _usage(card),
        _text_part("Intended use", stated.get("intended_use", "")),
        _list_part("Limitations", stated.get("limitations", [])),
        _results_part(card),
        _model_part(card),
        _training_part(card),
        _data_part(card),
        _list_part("Differences from the paper", stated.get("differences", [])),
        _list_part("Notes", stated.get("notes", [])),
        _source_part(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(card: Card) -> ModelCardData:
    """What the hub indexes of a card: library, licence, data, tags, and each metric's raw value."""
    stated = card.results["card"]
    datasets = stated.get("datasets", [])
    tags = ["layer-normalization", "pytorch-lightning", card.model, card.norm]
    own = registry.is_own(card.model)
    task = stated["pipeline_tag"] if own else registry.model_class(card.model).pipeline_tag
    return ModelCardData(
        library_name="ln-zoo",
        pipeline_tag=None if task == "other" else task,
        license=stated.get("license", "apache-2.0"),
        license_name=stated.get("license_name"),
        license_link=stated.get("license_link"),
        language=stated.get("language"),
        # Ids of the hub only: the page links to them.
        datasets=datasets or None,
        metrics=[metric["name"] for metric in card.metrics] or None,
        tags=[tag for tag in [*tags, *stated.get("tags", [])] if tag],
        model_name=card.name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=datasets[0] if len(datasets) == 1 else metric["dataset"],
                dataset_name=metric["dataset"],
                dataset_split=metric["split"],
                metric_type=metric["name"],
                metric_name=f"{metric['name']} ({metric['unit']})",
                metric_value=metric["value"],
            )
            for metric in card.metrics
        ],
    )


# Parts of the README


def _description(card: Card) -> str:
    text = card.results["card"].get("description")
    if text:
        return str(text)
    return f"`{card.model}` with `{card.norm}`, trained on {_trained_on(card)} by ln_zoo."


def _trained_on(card: Card) -> str:
    """The dataset of the last run. Some metrics have others."""
    return str(card.training_runs[-1].get("dataset", card.results["data"]["dataset"]))


def _pictures_part(card: Card) -> str:
    shown = card.results["card"].get("pictures", {})
    return "\n\n".join(f"![{text}]({name})\n\n{text}" for name, text in shown.items())


def _usage(card: Card) -> str:
    steps = "\n".join(_step(key, value) for key, value in card.preprocessing.items())
    stated, arguments, imports = card.results["card"], [f'"{card.name}"'], "import torch\n"
    if registry.is_own(card.model):
        module, _, name = card.model.rpartition(".")
        example = stated["example"]
        arguments.append(f"model={name}")
        imports += f"from {module} import {name}\n"
    else:
        example = registry.model_class(card.model).card_example(card.preprocessing)
    if registry.is_own(card.norm):
        module, _, name = card.norm.rpartition(".")
        arguments.append(f"norm={name}({_arguments(card.config['init_args']['norm'])})")
        imports += f"from {module} import {name}\n"
    return (
        "## Use\n\n"
        "Install `ln_zoo` as its README describes.\n\n"
        "```python\n"
        f"{imports}"
        "import ln_zoo\n\n"
        f"model = ln_zoo.load({', '.join(arguments)})"
        "  # or the path of this folder, or its hub id\n"
        f"{example}"
        "```\n\n"
        "Inputs must be prepared as in training (`model.card.preprocessing`):\n\n"
        f"{steps or '- no preparation'}"
    )


def _step(key: str, value: Any) -> str:
    if key == "scale" and isinstance(value, int | float):
        return f"- scale: divide stored values by `{value}`"
    return f"- {key}: {_code(value)}"


def _arguments(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in config["init_args"].items())


def _results_part(card: Card) -> str:
    if not card.metrics:
        return "## Results\n\nNothing was measured."
    rows = _compared(card)
    numbers = any(row.reported for row in rows)
    splits = {metric["name"]: f"{metric['dataset']}, {metric['split']}" for metric in card.metrics}
    heads = ["metric", "split", "measured", *(["reported", "difference"] if numbers else [])]
    lines = [_table_line(heads), _table_line(["---"] * len(heads))]
    for row in rows:
        metric, measured, *compared = row.cells()
        if error := _binomial_error(card, metric):
            measured += f" ± {error}"
        cells = [metric, splits[metric], measured, *(compared if numbers else [])]
        lines.append(_table_line(cells))
    if any(_binomial_error(card, metric["name"]) for metric in card.metrics):
        lines += ["", "±: binomial standard error over the test examples, for these weights."]
    if text := card.results["card"].get("uncertainty"):
        lines += ["", f"Uncertainty: {text}"]
    run = dict(card.results["evaluation"])
    if "versions" in run:
        run["versions"] = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    if "command" in run:
        command = _command_for_readers(run.pop("command"), card.name)
        lines += ["", "To reproduce these scores:", "", "```bash", command, "```"]
    lines += ["", "Measured with", ""]
    names = {"seed": "seed of the test"}  # which need not be that of the training
    lines += [f"- {names.get(key, key)}: {_code(value)}" for key, value in run.items()]
    return "\n".join(["## Results", "", *lines])


def _binomial_error(card: Card, metric: str) -> str:
    """The standard error of a share of examples, in per cent; empty for any other metric."""
    value, unit = next((m["value"], m["unit"]) for m in card.metrics if m["name"] == metric)
    examples, known = card.results["data"].get("test_size"), reported.metric_unit(metric)
    if known is not None and known.examples:
        examples = known.examples
    elif unit != "fraction":
        return ""
    share = value if unit == "fraction" else value / 100
    if not examples or not 0 < share < 1:
        return ""
    return f"{100 * (share * (1 - share) / examples) ** 0.5:.2g}"


def _command_for_readers(command: str, name: str) -> str:
    """The command of a test, on published weights in place of a checkpoint that they have not."""
    kept = []
    arguments = iter(shlex.split(command))
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option in _OF_OUR_MACHINE:
            if not equals:
                next(arguments, None)
            if option == "--ckpt_path":
                kept += ["--weights", name]
            continue
        kept.append(argument)
    return shlex.join(kept)


# Options of a test that say where its files lay, and how much it printed.
_OF_OUR_MACHINE = ("--ckpt_path", "--trainer.logger", "--trainer.enable_progress_bar")


def _compared(card: Card) -> list[reported.Row]:
    """The metrics of a card beside what is reported of them."""
    results = card.results
    size = reported.run_size(results["size"], results["data"], card.training_runs)
    rows = []
    for metric in card.metrics:
        rows += reported.comparison(
            card.model,
            card.norm,
            {metric["name"]: metric["value"]},
            data=f"{metric['dataset']}/{metric['split']}",
            size=size,
        )
    return rows


def _table_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _model_part(card: Card) -> str:
    weights = card.config["files"][catalog.WEIGHTS]
    lines = [
        "## Model",
        "",
        f"- class: `{'' if registry.is_own(card.model) else 'ln_zoo.models.'}{card.model}`, "
        f"{card.parameters:,} parameters",
    ]
    for key, value in card.config["init_args"].items():
        if key == "norm":
            lines.append(f"- norm: `{value['class']}({_arguments(value)})`")
        else:
            lines.append(f"- {key}: {_code(value)}")
    lines.append(f"- `{catalog.WEIGHTS}`: {weights['size']:,} bytes, sha256 `{weights['sha256']}`")
    if card.version:
        lines.append(f"- version: {card.version}")
    return "\n".join(lines)


def _training_part(card: Card) -> str:
    training = dict(card.results["training"])
    commands = training.pop("commands", [])
    training.pop("earlier", None)
    if time := card.results["card"].get("training_time"):
        training["time"] = time
    lines = ["## Training", "", *(f"- {key}: {_code(value)}" for key, value in training.items())]
    *earlier, _ = card.training_runs
    lines += [f"- started from: {in_words(run)}" for run in reversed(earlier)]
    if commands:
        lines += ["", "```bash", *commands, "```"]
    return "\n".join(lines)


def _data_part(card: Card) -> str:
    facts = card.results["data"]
    lines = [f"- {key}: {_code(value)}" for key, value in facts.items()]
    return "\n".join(["## Data", "", "As the test read them:", "", *lines])


def _list_part(title: str, items: list[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {item}" for item in items)]) if items else ""


def _text_part(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _source_part(card: Card) -> str:
    cited = reported.cited_for(card.model, card.norm, _trained_on(card))
    shown = [reported.citations()[row.reported.source] for row in _compared(card) if row.reported]
    all_cited = list(dict.fromkeys([*cited, *shown]))
    lines = []
    for c in all_cited:
        where = f"[arXiv {c.arxiv}]({c.link})" if c.arxiv else c.venue
        lines.append(f"- {c}. {where}")
    entries = "\n\n".join(c.bibtex for c in all_cited)
    return "\n".join(["## Sources", "", *lines, "", "```bibtex", entries, "```"])


def _code(value: Any) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value, ensure_ascii=False)}`"


# Reading what a card is made from


def _model_from_checkpoint(path: Path) -> ZooModule:
    try:
        return of_checkpoint(str(path), f"{IMPORT_IT}, or import it first in Python").load()
    except (OSError, ValueError) as error:
        raise CardError(str(error)) from error


def _read_test_results(path: Path) -> dict[str, Any]:
    value = _read_mapping(path)
    for key, kind in _TEST_RESULTS.items():
        if key not in value:
            raise CardError(f"{path} is not a results file of ln-zoo test: {key!r} is missing")
        if value[key] is None and kind in (int, str):
            raise CardError(
                f"{path} does not say {key}: it was not measured on a checkpoint; run "
                "ln-zoo test --ckpt_path FILE and give the file it writes"
            )
        if not isinstance(value[key], kind):
            raise CardError(f"{path}: {key} cannot be {value[key]!r}")
    for key, kind in (_SOMETIMES | _TRAINED).items():
        if not isinstance(value.get(key), (kind, type(None))):
            raise CardError(f"{path}: {key} cannot be {value[key]!r}")
    if value.get("part"):
        raise CardError(
            f"{path} was measured on a part of the test set: run ln-zoo test --ckpt_path FILE "
            "without --trainer.limit_test_batches and give the file it writes"
        )
    if "dataset" not in value["data"]:
        raise CardError(f"{path}: data: 'dataset' is missing")
    if not value["metrics"]:
        raise CardError(f"{path}: no metric was measured")
    return value


def _read_facts(facts: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if facts is None:
        return {}
    value = dict(facts) if isinstance(facts, Mapping) else _read_mapping(Path(facts))
    for key, content in value.items():
        if key not in _FACTS:
            near = difflib.get_close_matches(key, _FACTS, n=1)
            guess = f" (did you mean {near[0]}?)" if near else ""
            raise CardError(f"unknown fact {key!r}{guess}; known are {', '.join(_FACTS)}")
        if not isinstance(content, _FACTS[key]):
            raise CardError(f"fact {key} must be a {_FACTS[key].__name__}, got {content!r}")
    if value.get("license") == "other" and not value.keys() >= {"license_name", "license_link"}:
        raise CardError("license other needs license_name and license_link, which the hub shows")
    return value


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        value = parse_yaml(str(path)) if path.is_file() else None  # JSON is YAML
    except ValueError as error:
        raise CardError(str(error)) from error
    if value is None:
        raise CardError(f"{path} cannot be read: there is no such file, or it is empty")
    if not isinstance(value, dict):
        raise CardError(f"{path} holds no mapping of names to values")
    return value


def _optimization(stored: Any) -> dict[str, Any]:
    """Optimizer and schedule that took the place of the model's own, for the training part."""
    if not stored:
        return {}
    facts = {key: stored[key] for key in ("optimizer", "lr_scheduler") if stored.get(key)}
    if stored.get("lr_scheduler"):
        facts["lr_scheduler"] |= stored["lr_scheduler_config"]
    rate = (stored.get("optimizer") or {}).get("init_args", {}).get("lr")
    return facts | ({} if rate is None else {"lr": rate})


def _metrics(measured: Mapping[str, float], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    metrics = []
    for name, value in measured.items():
        bare = reported.bare_metric(name)
        known = reported.metric_unit(bare)
        unit = "" if known is None else known.logged or known.unit
        dataset, split = reported.measured_on(data, metric=bare).rsplit("/", 1)
        metrics.append(
            {
                "name": bare,
                "value": float(value),
                "unit": unit,
                "dataset": dataset,
                "split": split,
            }
        )
    return metrics


def _short_norm(model: ZooModule) -> str:
    return str(model.hparams["norm"]["class_path"]).rpartition(".")[2]


def _weights(model: ZooModule) -> dict[str, Tensor]:
    """The state dict as safetensors takes it: contiguous and unshared.

    Floats are stored in float32; in float16, half the size, where none of them loses anything: the
    weights of a checkpoint may have been rounded so before they were measured.
    """
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    floats = [value.float() for value in state.values() if value.is_floating_point()]
    exact = all(torch.equal(value, value.half().float()) for value in floats)
    kind = torch.float16 if exact else torch.float32
    return {
        name: (value.to(kind) if value.is_floating_point() else value).contiguous().clone()
        for name, value in state.items()
    }


# Writing


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
    # Two renames: whenever this is cut short, the old or the new card is whole under some name.
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
        raise CardError(f"a card holds plain, finite values only: {error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
