"""The README of a card folder, rendered from its data files by ``templates/card.md.jinja``.

What the paper reports is looked up in ``reported.yaml``, so nobody types a number.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ln_zoo.utils.training_runs import format_run
from ln_zoo.zoo import catalog, registry, reported
from ln_zoo.zoo.catalog import Card, Metric
from ln_zoo.zoo.rendering import render_template

#: Options of a test that name files of the machine, or how much was printed.
_LOCAL_OPTIONS = ("--ckpt_path", "--trainer.logger", "--trainer.enable_progress_bar")


def render_card(folder: str | os.PathLike[str]) -> str:
    """The README of a card folder: a function of its ``config.json`` and ``results.json``.

    Raises:
        CardError: if one of the two is damaged.
    """
    card = catalog.read_card(folder)
    facts, own = card.results.card, registry.is_own(card.model)
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
                metric_name=f"{metric.name} ({metric.unit})",
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
    if registry.is_own(card.model):
        module, _, name = card.model.rpartition(".")
        arguments.append(f"model={name}")
        imports.append((module, name))
        example = card.results.card["example"]
    else:
        example = registry.model_class(card.model).card_example(card.preprocessing)
    if registry.is_own(card.norm):
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
