"""``ln-zoo evaluate-sentences``: sentence vectors scored on MR, CR, SUBJ, MPQA and SICK."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ln_zoo.cli.commands import Count, OwnModules, at_least, suffix
from ln_zoo.utils.files import atomic_write_text, relative

if TYPE_CHECKING:
    from ln_zoo.metrics.sentence_scores import Score
    from ln_zoo.metrics.sentence_tasks import ProtocolName


def evaluate_sentences(
    encoders: list[str],
    *,
    protocol: Literal["fast", "original"] = "fast",
    tasks: str = "MR,CR,SUBJ,MPQA,SICK",
    data: str | None = None,
    as_is: bool = False,
    seed: Annotated[int, at_least(0)] = 0,
    features: Annotated[int, at_least(2)] = 2048,
    jobs: Count = 1,
    out: Annotated[Path, suffix(".csv", ".json", ".md")] | None = None,
    curve: Annotated[Path, suffix(".csv")] | None = None,
    import_: OwnModules = [],  # noqa: B006
) -> None:
    """Scores sentence vectors on the five tasks of skip-thoughts; also prints published scores.

    Rows with the same tasks and protocol are comparable; published rows are not, since their
    encoders were trained on other text for much longer. Controls: majority; word-mean:SOURCE, the
    mean of the word vectors of a model or a text file; echo-state[:SOURCE], a random echo state
    network that reads them (default: random vectors); untrained:SOURCE, a model or a configuration
    of `ln-zoo fit` (several joined by +) with new weights.

    Args:
        encoders: [LABEL=]ENCODER, a published model's name, a card folder, a hub id, a .ckpt file,
            a control, or existing scores: a .csv file of this command, or the test_results.json of
            a run with SentenceEvaluation
        protocol: fast: a penalty chosen on one part of each fold; original: the nested
            cross-validation of the released skip-thoughts code, 910 regressions per task
        tasks: names, separated by commas
        data: folder of the tasks; default: $LN_ZOO_DATA/sentence_tasks
        as_is: split sentences into words at white space; otherwise they are tokenised as in the
            released code, which needs nltk
        seed: seed of untrained weights and controls
        features: units of the echo state network
        jobs: number of processes that share the folds
        out: file to write: the numbers as .csv or .json, or the table as .md
        curve: also write the scores as a .csv file, one row per checkpoint by its number of
            updates, for `ln-zoo compare --x step`; every encoder must then be a .ckpt file
        import_: module that defines a checkpoint's own class
    """
    given = [_labelled(text) for text in encoders]
    for name, count in {label: sum(label == x for x, _ in given) for label, _ in given}.items():
        if count > 1:
            raise ValueError(f"{count} rows would have the label {name!r}: give LABEL=ENCODER")
    from rich.console import Console

    from ln_zoo.callbacks.sentence_evaluation import check_tasks
    from ln_zoo.cli.sentence_encoders import maker
    from ln_zoo.data.books.sentence_tasks import read_task
    from ln_zoo.metrics.sentence_scores import as_text, curve_csv, table

    names = check_tasks(tasks.split(","))
    read = functools.cache(lambda: [read_task(name, data, not as_is) for name in names])
    updates = {} if curve is None else _updates(given)
    # Generators: models are built one after the other, names and files are checked now.
    rows = [
        _reader(label, text, names, read, protocol)
        if text.endswith((".csv", ".json"))
        else _scores(label, maker(text, seed, features), read, protocol, jobs)
        for label, text in given
    ]
    published = _published_scores()
    scores: list[Score] = []
    for found in itertools.chain.from_iterable(rows):
        scores += found
        if out is not None:
            facts = {"protocol": protocol, "seed": seed}
            atomic_write_text(out, as_text(scores, out.suffix, published, **facts))
        if curve is not None:
            atomic_write_text(curve, curve_csv(scores, updates))
    Console(highlight=False, markup=False).print(table(scores, published))
    if out is not None:
        print(f"scores: {relative(out)}")


def _published_scores() -> dict[str, dict[str, float]]:
    """Reported scores of sentence vectors by metric, by method and table."""
    from ln_zoo.utils.package_data import read_data
    from ln_zoo.zoo.reported import reported

    found: dict[str, dict[str, float]] = {}
    for table in read_data("zoo/reported.yaml")["sentence_tables"]:
        for r in reported(model="SkipThought"):
            here = (r.source, r.place) == (table["source"], table["place"])
            if not (here and r.method.startswith(tuple(table["methods"]))):
                continue
            metric, value = r.metric, r.value
            if metric == "sick_relatedness":  # the same correlation, in per cent
                metric, value = "sick_pearson", value / 100
            found.setdefault(f"{r.method} ({table['title']})", {})[metric] = value
    return found


def _updates(given: Sequence[tuple[str, str]]) -> dict[str, int]:
    from ln_zoo.zoo.reading import read_checkpoint

    found: dict[str, int] = {}
    for label, path in given:
        step = read_checkpoint(path).get("global_step") if path.endswith(".ckpt") else None
        if step is None:
            raise ValueError(f"--curve needs checkpoints of training, .ckpt files; got {path}")
        if step in found.values():
            raise ValueError(
                f"--curve: two checkpoints have {step:,} updates: give checkpoints of one run"
            )
        found[label] = step
    return found


def _reader(
    label: str, text: str, names: Sequence[str], tasks: Callable[[], list[Any]], protocol: str
) -> Iterator[list[Score]]:
    """Scores of a file, which is read now, so that its mistakes are found first."""
    from ln_zoo.metrics.sentence_scores import read_csv, read_tested, score_of

    path = Path(text)
    if path.suffix == ".json":
        values = read_tested(path, protocol)

        def tested() -> Iterator[list[Score]]:
            for task in tasks():
                yield [
                    score_of(label, metric, value, items=_items(task), protocol=protocol)
                    for metric, value in values.items()
                    if metric.partition("_")[0] == task.name.lower()
                ]

        return tested()
    rows = [score for score in read_csv(path) if score.metric.partition("_")[0].upper() in names]
    if others := {score.protocol for score in rows} - {protocol}:
        raise ValueError(f"{path} has scores by the {others.pop()} protocol: give --protocol")
    return iter([rows])


def _items(task: Any) -> int:
    return len(task.labels if hasattr(task, "labels") else task.test.scores)


def _labelled(text: str) -> tuple[str, str]:
    label, equals, encoder = text.partition("=")
    if not equals:
        return text.removesuffix(".ckpt"), text
    if not label or not encoder:
        raise ValueError(f"expected ENCODER or LABEL=ENCODER, got {text!r}")
    return label, encoder


def _scores(
    label: str,
    make: Callable[[], Any],
    tasks: Callable[[], list[Any]],
    protocol: ProtocolName,
    jobs: int,
) -> Iterator[list[Score]]:
    from ln_zoo.metrics.sentence_models import model_scores, unknown_share
    from ln_zoo.metrics.sentence_scores import score_of

    model = make()
    for task in tasks():
        begin = time.perf_counter()
        found = model_scores(model, task, protocol, jobs)
        seconds = time.perf_counter() - begin
        shown = ", ".join(f"{metric} {value:.4g}" for metric, value in found.items())
        print(f"{label}: {shown} ({seconds:.0f} s)", file=sys.stderr)
        facts: dict[str, Any] = {"items": _items(task), "protocol": protocol, "seconds": seconds}
        facts["unknown"] = unknown_share(model, task)
        yield [score_of(label, metric, value, **facts) for metric, value in found.items()]
