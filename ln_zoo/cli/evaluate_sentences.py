"""``ln-zoo evaluate-sentences``: sentence vectors scored on MR, CR, SUBJ, MPQA and SICK."""

from __future__ import annotations

import argparse
import csv
import functools
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ln_zoo.cli.checks import check_file, check_least
from ln_zoo.cli.names import nearest
from ln_zoo.files import write_whole
from ln_zoo.zoo import trust

if TYPE_CHECKING:
    from rich.table import Table

    from ln_zoo.metrics.sentence_controls import WordVectors

#: The columns of the paper's Table 3: metric, heading, digits.
_COLUMNS = {
    "sick_pearson": ("SICK r", 3),
    "sick_spearman": ("SICK rho", 3),
    "sick_mse": ("SICK MSE", 3),
    "mr": ("MR", 1),
    "cr": ("CR", 1),
    "subj": ("SUBJ", 1),
    "mpqa": ("MPQA", 1),
}
_CONTROLS = ("majority", "word-mean", "echo-state")
_TASKS = "MR,CR,SUBJ,MPQA,SICK"
#: Sources whose rows stand below: their tables, and what is not as here.
_BESIDE = {
    ("ba2016", "Table 3, section 6.3"): "paper, Table 3",
    ("wieting2019", "Table 1"): "Wieting & Kiela 2019, Table 1, by SentEval",
}
#: Methods of Wieting and Kiela that are shown.
_SHOWN = ("ST-LN", "random echo state network", "bag of embeddings")


class Encoder(NamedTuple):
    """What is scored: the name of its row, and an object with ``encode``."""

    label: str
    model: Any


@dataclass(frozen=True)
class Score:
    """One number of one encoder, a row of the CSV file.

    Attributes:
        encoder: its label.
        metric: such as ``mr``.
        value: per cent, a correlation, or a mean squared error.
        standard_error: of an accuracy binomial, of Pearson's r by Fisher's transformation; else
            none.
        items: sentences or test pairs that were scored.
        unknown: share of the task's words that the encoder does not know; none without vocabulary.
        protocol: ``fast`` or ``original``.
        seconds: that encoding and scoring the task took.
    """

    encoder: str
    metric: str
    value: float
    standard_error: float | None
    items: int
    unknown: float | None
    protocol: str
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    trust.import_own(arguments)
    _evaluate(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo evaluate-sentences",
        description="Scores sentence vectors on the five tasks of skip-thoughts, and prints "
        "them above the papers' numbers. Rows can be compared with each other if "
        "tasks and protocol are the same, but not with the papers' rows, whose "
        "encoders were trained on other text for much longer.",
        epilog="Controls: majority; word-mean:SOURCE and echo-state[:SOURCE], the mean of the word "
        "vectors of a model or a text file, and a random echo state network that reads them "
        "(default: random ones); untrained:SOURCE, a model, or the model of a configuration of "
        "`ln-zoo fit` (several with + between), with fresh weights.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "encoders",
        nargs="+",
        metavar="[LABEL=]ENCODER",
        help="a published model's name, a card folder, a hub id, a .ckpt file, a "
        "control, or existing scores: a .csv file of this command, or the "
        "test_results.json of a run with SentenceEvaluation",
    )
    parser.add_argument(
        "--protocol",
        choices=("fast", "original"),
        default="fast",
        help="fast: a penalty chosen on one part of each fold; original: the nested "
        "cross-validation of the released skip-thoughts code, 910 regressions per "
        "task; default fast",
    )
    parser.add_argument("--tasks", default=_TASKS, help=f"with commas between; default {_TASKS}")
    parser.add_argument(
        "--data", metavar="FOLDER", help="folder of the tasks; default: $LN_ZOO_DATA/sentence_tasks"
    )
    parser.add_argument(
        "--as_is",
        action="store_true",
        help="split sentences into words at white space; otherwise they are tokenised "
        "as in the released code, which needs nltk",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of untrained weights and controls; default 0"
    )
    parser.add_argument(
        "--features", type=int, default=2048, help="units of the echo state network; default 2048"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of processes that share the folds"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write: the numbers as .csv or .json, or the table as .md",
    )
    parser.add_argument(
        "--curve",
        metavar="FILE",
        help="also write the scores as a .csv file, one row per checkpoint by its number of "
        "updates, for `ln-zoo compare --x step`; every encoder must then be a .ckpt file",
    )
    trust.add_import_option(parser)
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    check_least(arguments, jobs=1, features=2, seed=0)
    out = Path(arguments.out) if arguments.out else None
    if out is not None:
        if out.suffix not in (".csv", ".json", ".md"):
            raise ValueError(f"--out {out} must end in .csv, .json or .md")
        check_file(out)
    curve = Path(arguments.curve) if arguments.curve else None
    if curve is not None:
        if curve.suffix != ".csv":
            raise ValueError(f"--curve {curve} must end in .csv")
        check_file(curve)
    given = [_labelled(text) for text in arguments.encoders]
    for name, count in {label: sum(label == x for x, _ in given) for label, _ in given}.items():
        if count > 1:
            raise ValueError(f"{count} rows would have the label {name!r}: give LABEL=ENCODER")
    # Here, since it takes seconds to import torch.
    from ln_zoo.callbacks.sentence_evaluation import check_tasks

    tasks = _Tasks(check_tasks(arguments.tasks.split(",")), arguments)
    updates = {} if curve is None else _updates(given)
    makers = [
        _reader(label, text, tasks, arguments.protocol)
        if text.endswith((".csv", ".json"))
        else _scorer(label, _maker(text, arguments), tasks, arguments)
        for label, text in given
    ]
    scores: list[Score] = []
    for make in makers:
        for found in make():
            scores += found
            if out is not None:
                _save(scores, out, arguments)
            if curve is not None:
                write_whole(curve, _curve(scores, updates))
    from rich.console import Console

    Console(highlight=False, markup=False).print(table(scores))
    if out is not None:
        from ln_zoo.cli.outputs import relative

        print(f"scores: {relative(out)}")


def _updates(given: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The updates that each checkpoint has behind it, by label."""
    from ln_zoo.cli.stored import read_checkpoint

    found: dict[str, int] = {}
    for label, path in given:
        step = read_checkpoint(path).get("global_step") if path.endswith(".ckpt") else None
        if step is None:
            raise ValueError(f"--curve needs checkpoints of training, .ckpt files; got {path}")
        if step in found.values():
            raise ValueError(
                f"--curve: two checkpoints have {step:,} updates: give those of one run"
            )
        found[label] = step
    return found


class _Tasks:
    """The tasks, read when the first is asked for.

    Args:
        names: of the tasks.
        arguments: of the command.
    """

    def __init__(self, names: Sequence[str], arguments: argparse.Namespace) -> None:
        self.names = names
        self._arguments = arguments

    @functools.cached_property
    def read(self) -> list[Any]:
        """All tasks."""
        from ln_zoo.data.sentence_tasks import read_task

        arguments = self._arguments
        return [read_task(name, arguments.data, not arguments.as_is) for name in self.names]

    def has(self, metric: str) -> bool:
        """Whether a metric is of one of them."""
        return metric.partition("_")[0].upper() in self.names


#: Gives scores, those of one task after the other.
_Scorer = Callable[[], Iterator[list[Score]]]


def _scorer(
    label: str, make: Callable[[], Any], tasks: _Tasks, arguments: argparse.Namespace
) -> _Scorer:
    def score() -> Iterator[list[Score]]:
        encoder = Encoder(label, make())
        for task in tasks.read:
            yield _scores(encoder, task, arguments)

    return score


def _reader(label: str, text: str, tasks: _Tasks, protocol: str) -> _Scorer:
    """Scores that a file has; mistakes in it are told at once."""
    path = Path(text)
    if path.suffix == ".json":
        values = _tested(path, protocol)

        def tested() -> Iterator[list[Score]]:
            for task in tasks.read:
                yield [
                    _score(label, metric, value, items=_items(task), protocol=protocol)
                    for metric, value in values.items()
                    if metric.partition("_")[0] == task.name.lower()
                ]

        return tested
    rows = [score for score in _stored(path) if tasks.has(score.metric)]
    if others := {score.protocol for score in rows} - {protocol}:
        raise ValueError(f"{path} has scores by the {others.pop()} protocol: give --protocol")
    return lambda: iter([rows])


def _tested(path: Path, protocol: str) -> dict[str, float]:
    """Scores of a run's test by metric."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
        # Those of SICK are of both protocols.
        names = {
            m: m if m.startswith("sick") or protocol != "fast" else f"{m}_fast" for m in _COLUMNS
        }
        found = {metric: float(metrics[name]) for metric, name in names.items() if name in metrics}
    except (ValueError, KeyError, TypeError):
        found = {}
    if not found:
        raise ValueError(
            f"{path} has no scores by the {protocol} protocol: test a run with the callback "
            "SentenceEvaluation"
        )
    return found


def _stored(path: Path) -> list[Score]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                Score(
                    encoder=row["encoder"],
                    metric=row["metric"],
                    value=math.nan if not row["value"] else float(row["value"]),
                    standard_error=number(row["standard_error"]),
                    items=int(row["items"]),
                    unknown=number(row["unknown"]),
                    protocol=row["protocol"],
                    seconds=float(row["seconds"]),
                )
                for row in csv.DictReader(file)
            ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of scores as --out writes them") from error


def _items(task: Any) -> int:
    return len(task.labels if hasattr(task, "labels") else task.test.scores)


def _labelled(text: str) -> tuple[str, str]:
    label, equals, encoder = text.partition("=")
    if not equals:
        return text.removesuffix(".ckpt"), text
    if not label or not encoder:
        raise ValueError(f"expected ENCODER or LABEL=ENCODER, got {text!r}")
    return label, encoder


def _maker(text: str, arguments: argparse.Namespace) -> Callable[[], Any]:
    """What makes an encoder; mistakes in its name are told at once."""
    kind, _, source = text.partition(":")
    seed = arguments.seed
    if kind == "majority" and not source:
        return _Majority
    if kind == "word-mean":
        if not source:
            raise ValueError("word-mean needs word vectors: word-mean:MODEL or word-mean:FILE")
        return lambda: _WordMean(source)
    if kind == "echo-state":
        return lambda: _EchoState(source, arguments.features, seed)
    if kind == "untrained" and source:
        return lambda: _untrained(source, seed)
    if "." not in text and os.sep not in text and nearest(text, _CONTROLS):
        raise ValueError(
            f"no control {text!r}{nearest(text, _CONTROLS)} ({', '.join(_CONTROLS)}, untrained:...)"
        )
    return lambda: _model(text)


def _model(weights: str) -> Any:
    from ln_zoo.callbacks.sentence_evaluation import check_encodes
    from ln_zoo.cli import stored

    model = stored.load_model(weights)
    check_encodes(model)
    return model


def _untrained(source: str, seed: int) -> Any:
    """A model with weights as before the first update, drawn by the seed."""
    import torch

    from ln_zoo.callbacks.sentence_evaluation import check_encodes

    paths = source.split("+")
    if all(path.endswith((".yaml", ".yml")) for path in paths):
        from ln_zoo.cli.lightning import ZooCLI

        configs = [part for path in paths for part in ("--config", path)]
        with tempfile.TemporaryDirectory() as folder:  # of a run that is not begun
            options = ("--trainer.logger=false", f"--trainer.default_root_dir={folder}")
            model = ZooCLI(["fit", *configs, f"--seed_everything={seed}", *options]).model
        check_encodes(model)
    else:
        model = _model(source)
    if not callable(getattr(model, "reset_parameters", None)):
        raise ValueError(f"{source} is a {type(model).__name__}, which cannot draw weights anew")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.reset_parameters()
    return model.eval()


class _Majority:
    def encode(self, sentences: Sequence[str]) -> Any:
        from ln_zoo.metrics.sentence_controls import majority

        return majority(sentences)


class _WordMean:
    """The mean of the word vectors of a model or a file; its words are the vocabulary."""

    def __init__(self, source: str) -> None:
        from ln_zoo.metrics.sentence_controls import MeanOfWords

        vectors, self.vocabulary = _word_vectors(source)
        self.encode = MeanOfWords(vectors)


class _EchoState:
    """A random echo state network on word vectors: those of a model or a file, or random ones."""

    def __init__(self, source: str, features: int, seed: int) -> None:
        from ln_zoo.metrics.sentence_controls import EchoState, WordVectors

        if source:
            vectors, self.vocabulary = _word_vectors(source)
        else:
            vectors = WordVectors(seed=seed)
        network = EchoState(vectors, features, seed=seed)
        # Random vectors are of words in lower case, as those of our models are.
        self.encode = network if source else lambda texts: network([t.lower() for t in texts])


def _word_vectors(source: str) -> tuple[WordVectors, frozenset[str]]:
    from ln_zoo.metrics.sentence_controls import WordVectors
    from ln_zoo.vocabulary import read_word_vectors

    if source.endswith((".txt", ".vec", ".gz")):
        words, vectors = read_word_vectors(source)
    else:
        model = _model(source)
        table = getattr(getattr(model, "embedding", None), "weight", None)
        if table is None:
            raise ValueError(f"{source} is a {type(model).__name__}, which has no word vectors")
        words = list(model.vocabulary)
        # The first two are of the end of a sentence and of unknown words.
        vectors = table.detach().float().cpu().numpy()[-len(words) :]
    return WordVectors(words, vectors), frozenset(words)


def _scores(encoder: Encoder, task: Any, arguments: argparse.Namespace) -> list[Score]:
    from ln_zoo.callbacks.sentence_evaluation import model_scores, unknown_share

    begin = time.perf_counter()
    found = model_scores(encoder.model, task, arguments.protocol, arguments.jobs)
    seconds = time.perf_counter() - begin
    told = ", ".join(f"{metric} {value:.4g}" for metric, value in found.items())
    print(f"{encoder.label}: {told} ({seconds:.0f} s)", file=sys.stderr)
    score = functools.partial(
        _score,
        items=_items(task),
        protocol=arguments.protocol,
        unknown=unknown_share(encoder.model, task),
        seconds=seconds,
    )
    return [score(encoder.label, metric, value) for metric, value in found.items()]


def _score(
    label: str,
    metric: str,
    value: float,
    *,
    items: int,
    protocol: str,
    unknown: float | None = None,
    seconds: float = math.nan,
) -> Score:
    error = standard_error(metric, value, items)
    return Score(label, metric, value, error, items, unknown, protocol, seconds)


def standard_error(metric: str, value: float, items: int) -> float | None:
    """Of an accuracy in per cent or a Pearson correlation, from the number of items alone.

    Example:
        >>> round(standard_error("mr", 77.3, 10_662), 2)
        0.41
    """
    if metric == "sick_pearson":
        return (1 - value**2) / math.sqrt(items - 3)
    if metric.startswith("sick"):
        return None
    share = value / 100
    return 100 * math.sqrt(share * (1 - share) / items)


def table(scores: Sequence[Score]) -> Table:
    """Scores in the layout of the paper's Table 3, above its rows and those of Wieting and Kiela.

    Args:
        scores: of one or more encoders, by one protocol.
    """
    from rich import box
    from rich.table import Table as RichTable

    head, ours, reported_rows = _rows(scores)
    shown = RichTable(
        box=box.SIMPLE,
        pad_edge=False,
        title=_title(scores),
        caption=_CAPTION,
    )
    shown.add_column(head[0])
    for name in head[1:]:
        shown.add_column(name, justify="right")
    for row in ours:
        shown.add_row(*row)
    if reported_rows:
        shown.add_section()
    for row in reported_rows:
        shown.add_row(*row)
    return shown


def markdown(scores: Sequence[Score]) -> str:
    """As `table`, in Markdown, with reported rows in italics."""
    from ln_zoo.cli.compare import table_head

    head, ours, reported_rows = _rows(scores)
    italic = [[f"*{cell}*" if cell else "" for cell in row] for row in reported_rows]
    lines = [f"| {' | '.join(row)} |" for row in [*ours, *italic]]
    return "\n".join([f"{_title(scores)}. {_CAPTION}.", "", *table_head(head), *lines, ""])


_CAPTION = (
    "± one standard error by the number of items; reported rows are not comparable: trained on "
    "BookCorpus, for much longer"
)


def _title(scores: Sequence[Score]) -> str:
    return f"Sentence vectors, {scores[0].protocol} protocol"


def _rows(scores: Sequence[Score]) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """The head of the table, rows of encoders, and rows of what papers report."""
    from ln_zoo.zoo.reported import reported

    metrics = [metric for metric in _COLUMNS if any(s.metric == metric for s in scores)]
    rows: dict[str, dict[str, str]] = {}
    for score in scores:
        rows.setdefault(score.encoder, {})[score.metric] = _cell(score)
    beside: dict[str, dict[str, str]] = {}
    for number in reported(model="SkipThought"):
        source = _BESIDE.get((number.source, number.place))
        if source is None or (
            number.source == "wieting2019" and not number.method.startswith(_SHOWN)
        ):
            continue
        metric, value = number.metric, number.value
        if metric == "sick_relatedness":  # the same correlation, in per cent
            metric, value = "sick_pearson", value / 100
        if metric in metrics:
            cells = beside.setdefault(f"{number.method} ({source})", {})
            cells[metric] = f"{value:.{_COLUMNS[metric][1]}f}"
    head = ["encoder", *(_COLUMNS[metric][0] for metric in metrics)]
    found, others = (
        [[label, *(cells.get(metric, "") for metric in metrics)] for label, cells in part.items()]
        for part in (rows, beside)
    )
    return head, found, others


def _cell(score: Score) -> str:
    if math.isnan(score.value):
        return "-"
    digits = _COLUMNS[score.metric][1]
    error = "" if score.standard_error is None else f" ± {score.standard_error:.{digits}f}"
    return f"{score.value:.{digits}f}{error}"


def _save(scores: Sequence[Score], out: Path, arguments: argparse.Namespace) -> None:
    """Writes the scores so far; the file appears whole."""
    rows = [_plain(asdict(score)) for score in scores]
    if out.suffix == ".md":
        text = markdown(scores)
    elif out.suffix == ".json":
        content = {"protocol": arguments.protocol, "seed": arguments.seed, "scores": rows}
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    else:
        text = _csv(rows)
    write_whole(out, text)


def _curve(scores: Sequence[Score], updates: Mapping[str, int]) -> str:
    """Scores by updates, with the names that `SentenceEvaluation` logs."""
    rows: dict[int, dict[str, Any]] = {}
    for score in scores:
        row = rows.setdefault(updates[score.encoder], {"step": updates[score.encoder]})
        row[f"step_{score.metric}"] = _plain({"value": score.value})["value"]
    return _csv([rows[step] for step in sorted(rows)])


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = io.StringIO()
    writer = csv.DictWriter(lines, max(map(list, rows), key=len), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with the digits that mean something; what is not a number is none."""
    return {
        name: (None if math.isnan(value) else float(f"{value:.6g}"))
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }
