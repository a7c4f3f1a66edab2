"""Which LSTM with layer normalisation? Nine sets of equations on three small tasks.

``python -m benchmarks.which_lstm train --csv docs/figures/which_lstm_runs.csv`` trains one layer
with each set on pixels, characters and handwriting from ``LN_ZOO_DATA``; finished runs in the file
are kept. ``speed --csv docs/figures/which_lstm_speed.csv`` times a training step of each,
interleaved. ``report`` writes the table and the picture of docs/results/which_lstm.md from both.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runner
from examples.language_model import text
from ln_zoo.data import MNIST, IAMOnDB
from ln_zoo.layers import LSTM, SLSTM, RecurrentLayer, set_forget_bias
from ln_zoo.metrics import PenMixture
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.ops import CARRIED_LSTM, JOINT_LSTM
from ln_zoo.plots.figures import new_figure, save_figure
from ln_zoo.sweeps.statistics import SeedSummary, paired

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
BASELINE = "none"


class Equations(NamedTuple):
    """A recurrent layer, and whether its input and output are normalised outside it."""

    layer: Callable[[int, int], RecurrentLayer]
    outside: bool = False


EQUATIONS = {
    BASELINE: Equations(LSTM),
    "paper": Equations(partial(LSTM, norm=LayerNorm())),
    "paper, per gate": Equations(partial(LSTM, norm=LayerNorm(per_gate=True))),
    "paper, RMS norm": Equations(partial(LSTM, norm=RMSNorm())),
    "joint": Equations(partial(RecurrentLayer, cell=JOINT_LSTM, norm=LayerNorm())),
    "carried": Equations(partial(RecurrentLayer, cell=CARRIED_LSTM, norm=LayerNorm())),
    "pre-norm": Equations(LSTM, outside=True),
    "sLSTM": Equations(partial(SLSTM, norm=LayerNorm())),
    "sLSTM, pre-norm": Equations(SLSTM, outside=True),
}


class Network(nn.Module):
    """An encoder of each step, one recurrent layer, and a readout.

    With ``outside`` norms act before each matrix but the recurrent one, as in pre-norm blocks
    (Xiong et al. 2020; Beck et al. 2024): on the layer's input and on its output.
    """

    def __init__(self, encoder: nn.Module, equations: Equations, hidden: int, outputs: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, hidden) if equations.outside else nn.Identity
        self.encoder, self.before, self.after = encoder, norm(), norm()
        self.rnn = equations.layer(hidden, hidden)
        self.readout = nn.Linear(hidden, outputs)
        set_forget_bias(self.rnn, 1.0)

    def forward(self, x: Tensor, last: bool) -> Tensor:
        """Outputs (T, N, K), or (N, K) of the last step, for steps x (T, N, ...)."""
        h = self.rnn(self.before(self.encoder(x)))[0]
        found: Tensor = self.readout(self.after(h[-1] if last else h))
        return found


class Examples(NamedTuple):
    """Inputs (T, N, ...) and targets (..., N) or (T, N, ...)."""

    x: Tensor
    y: Tensor


@dataclass
class Task:
    """Data of a task, and the size of its network and its training."""

    name: str
    sets: Mapping[str, Examples]
    hidden: int
    encoder: Callable[[], nn.Module]
    outputs: int
    batch: int
    updates: int
    rates: Sequence[float] = (3e-3, 1e-2)
    last: bool = False  # one target for each sequence

    def network(self, equations: Equations) -> Network:
        return Network(self.encoder(), equations, self.hidden, self.outputs)

    def pick(self, name: str, which: Tensor) -> Examples:
        """These sequences of a set."""
        x, y = self.sets[name]
        return Examples(x.index_select(1, which), y.index_select(0 if self.last else 1, which))

    def loss(self, network: Network, examples: Examples) -> Tensor:
        """Mean nats of a target."""
        outputs = network(examples.x, self.last)
        if self.name == "handwriting":
            return PenMixture.of(outputs).nll(examples.y).mean()
        return F.cross_entropy(outputs.flatten(0, -2), examples.y.flatten())

    @torch.no_grad()
    def score(self, network: Network, name: str) -> tuple[float, float]:
        """Nats and score of a set: accuracy in percent, bits a character, or nats a point."""
        nats, right, number = 0.0, 0.0, self.sets[name].x.shape[1]
        for which in torch.arange(number).split(500):
            examples = self.pick(name, which)
            nats += self.loss(network, examples).item() * len(which) / number
            if self.last:
                found = network(examples.x, True).argmax(-1)
                right += float((found == examples.y).float().sum()) / number
        if self.last:
            return nats, 100 * right
        return nats, nats / math.log(2) if self.name == "characters" else nats


def pixels() -> Task:
    """MNIST at 14 x 14, permuted, one pixel a step."""
    order = torch.randperm(196, generator=torch.Generator().manual_seed(0))
    data, sets = MNIST(), {}
    for name, (images, labels) in data.read().items():
        number = {"train": 50_000, "val": 2_000, "test": 4_000}[name]
        small = F.avg_pool2d(images[:number].float() / 255, 2).flatten(1)[:, order]
        sets[name] = Examples(small.T.unsqueeze(-1).contiguous(), labels[:number])
    return Task(
        "pixels", sets, 64, partial(nn.Linear, 1, 64), 10, 32, 600, (1e-3, 3e-3, 1e-2), True
    )


def characters() -> Task:
    """The first 400,000 characters of a novel in windows of 64; later ones are held out."""
    _, string = text()
    known = sorted(set(string))
    codes = torch.tensor([known.index(c) for c in string[:480_000]])
    sets = {}
    for name, ends in {"train": (0, 400), "val": (400, 430), "test": (430, 480)}.items():
        rows = codes[1000 * ends[0] : 1000 * ends[1]].unfold(0, 65, 64).T
        sets[name] = Examples(rows[:-1].contiguous(), rows[1:].contiguous())
    size = len(known)
    return Task("characters", sets, 128, partial(nn.Embedding, size, 128), size, 32, 300)


def handwriting() -> Task:
    """The first 100 points of lines of IAM-OnDB: the next point of each (Graves 2013, 4)."""
    data = IAMOnDB(split="official", length_mode="crop", max_points=100)
    data.setup()
    mean, std = data.offset_statistics
    sets = {}
    for name, number in {"train": None, "val": 500, "test": 1000}.items():
        lines = data.training_set() if name == "train" else data.evaluation_set(name)
        long = [i for i in range(len(lines)) if len(lines.offsets(i)) > 100][:number]
        points = torch.stack([lines.offsets(i)[:101] for i in long], 1)
        points[..., :2] = (points[..., :2] - mean) / std
        points[0] = 0
        sets[name] = Examples(points[:-1].contiguous(), points[1:].contiguous())
    return Task("handwriting", sets, 96, partial(nn.Linear, 3, 96), 61, 32, 200)


TASKS = {task.__name__: task for task in (pixels, characters, handwriting)}


@dataclass
class Run:
    """A finished run; ``seconds`` of processor time in training."""

    task: str
    equations: str
    rate: float
    seed: int
    val_nats: float
    test_score: float
    seconds: float
    updates: int
    parameters: int
    date: str


def train(task: Task, name: str, rate: float, seed: int) -> Run:
    """Train by Adam, clipped to norm 1, at a rate that falls to 0 along a cosine."""
    torch.manual_seed(seed)
    network = task.network(EQUATIONS[name])
    optimizer = torch.optim.Adam(network.parameters(), lr=rate, fused=True)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.updates)
    order = torch.Generator().manual_seed(seed)
    number = task.sets["train"].x.shape[1]
    start = time.process_time()
    for _ in range(task.updates):
        which = torch.randint(number, (task.batch,), generator=order)
        optimizer.zero_grad()
        task.loss(network, task.pick("train", which)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
    seconds = time.process_time() - start
    network.eval()
    return Run(
        task.name, name, rate, seed, task.score(network, "val")[0], task.score(network, "test")[1],
        seconds, task.updates, sum(p.numel() for p in network.parameters()),
        datetime.date.today().isoformat(),
    )  # fmt: skip


def read_runs(path: Path) -> list[Run]:
    """The finished runs of a file, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Run(**{key: kind(row[key]) for key, kind in _KINDS.items()})
            for row in csv.DictReader(file)
        ]


_KINDS: dict[str, Callable[[str], Any]] = {
    name: {"str": str, "int": int, "float": float}[kind]
    for name, kind in Run.__annotations__.items()
}


def best_rate(runs: Sequence[Run], task: str, equations: str) -> float:
    """The rate with the lowest validation loss with seed 0."""
    tried = [r for r in runs if (r.task, r.equations, r.seed) == (task, equations, 0)]
    # A loss that is not a number loses.
    return min(tried, key=lambda r: (math.isnan(r.val_nats), r.val_nats)).rate


def train_all(path: Path, names: Sequence[str], seeds: int) -> None:
    """Train each rate with seed 0, then the best of each set of equations with other seeds."""
    tasks = {name: TASKS[name]() for name in names}

    def run(task: str, equations: str, rate: float, seed: int) -> None:
        runs = read_runs(path)
        key = task, equations, rate, seed
        if key in {(r.task, r.equations, r.rate, r.seed) for r in runs}:
            return
        found = train(tasks[task], equations, rate, seed)
        runner.write([asdict(r) for r in (*runs, found)], path)
        print(*asdict(found).values(), flush=True)

    for task in tasks:
        for equations in EQUATIONS:
            for rate in tasks[task].rates:
                run(task, equations, rate, 0)
    for seed in range(1, seeds):
        for task in tasks:
            for equations in EQUATIONS:
                run(task, equations, best_rate(read_runs(path), task, equations), seed)


def time_all(given: argparse.Namespace) -> list[runner.Row]:
    """A row for each task and set of equations: a training step, forward and backward."""
    found: list[runner.Row] = []
    for name in given.tasks:
        task, calls = TASKS[name](), {}
        examples = task.pick("train", torch.arange(task.batch))
        for equations, chosen in EQUATIONS.items():
            torch.manual_seed(0)
            network = task.network(chosen)
            loss = partial(task.loss, network, examples)
            calls[equations] = runner.training_step(network, loss)
        size = {"T": len(examples.x), "B": task.batch, "I": task.hidden, "H": task.hidden}
        found += [{"task": name} | row for row in runner.compare(calls, BASELINE, size, given)]
        runner.write(found, given.csv)
    return found


#: Units of the scores; accuracy is better if higher, the others if lower.
SCORES = {
    "pixels": "accuracy (%)",
    "characters": "bits a character",
    "handwriting": "nats a point",
}


def summary(runs: Sequence[Run], speed: Sequence[Mapping[str, str]]) -> list[runner.Row]:
    """A row for each task and set of equations: test scores at the best rate, and time.

    Differences are from no norm, paired by seed, with 95 % intervals.
    """
    times = {(row["task"], row["contestant"]): float(row["cpu_ratio"]) for row in speed}
    scores: dict[tuple[str, str], dict[int, float]] = {}
    rates = {(t, e): best_rate(runs, t, e) for t in SCORES for e in EQUATIONS}
    for run in runs:
        if run.rate == rates[run.task, run.equations]:
            scores.setdefault((run.task, run.equations), {})[run.seed] = run.test_score
    found = []
    for (task, equations), rate in rates.items():
        own = scores[task, equations]
        seeds = SeedSummary.of([*own.values()])
        difference = paired(own, scores[task, BASELINE])
        assert difference is not None
        found.append(
            {
                "task": task,
                "equations": equations,
                "rate": rate,
                "seeds": seeds.number,
                "score": seeds.mean,
                "score_deviation": seeds.deviation,
                "difference": difference.mean,
                "difference_low": difference.low,
                "difference_high": difference.high,
                "cpu_ratio": times[task, equations],
            }
        )
    return found


def print_table(rows: Sequence[runner.Row]) -> None:
    """Print the table: for each task the score and the difference from no norm, and the time."""
    by_key = {(row["task"], row["equations"]): row for row in rows}
    runner.print_row(["", *(f"{task}, {unit}" for task, unit in SCORES.items()), "time"])
    print("|---" * (2 + len(SCORES)) + "|")
    for equations in EQUATIONS:
        cells = []
        for task in SCORES:
            digits = 1 if task == "pixels" else 3
            row = by_key[task, equations]
            text = f"{row['score']:.{digits}f} ± {row['score_deviation']:.{digits}f}"
            if equations != BASELINE:
                ends = (row[f"difference{end}"] for end in ("", "_low", "_high"))
                first, low, high = (f"{end:+.{digits}f}" for end in ends)
                text += f"; {first} ({low} to {high})"
            cells.append(text)
        ratios = (f"{by_key[task, equations]['cpu_ratio']:.2f}" for task in SCORES)
        runner.print_row([equations, *cells, ", ".join(ratios)])


def draw(rows: Sequence[runner.Row], path: Path) -> None:
    """Scores and standard deviations over seeds by the time of a training step; up is better."""
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, len(SCORES))
    markers = dict(zip(EQUATIONS, "o^v<>sDPX", strict=False))
    for axes, (task, unit) in zip(panels, SCORES.items(), strict=True):
        for place, (equations, marker) in enumerate(markers.items()):
            (row,) = (r for r in rows if (r["task"], r["equations"]) == (task, equations))
            axes.errorbar(
                row["cpu_ratio"], row["score"], row["score_deviation"], color=f"C{place}",
                marker=marker, label=equations, linestyle="", capsize=3,
            )  # fmt: skip
        axes.set(title=task, ylabel=unit)
        if task != "pixels":
            axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    label = "processor time of a training step, relative to no norm (up and left is better)"
    figure.supxlabel(label, fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, times, or reports."""
    parser = runner.parser("which_lstm", __doc__, rounds=15, seconds=2.0, threads=1)
    parser.add_argument("what", choices=("train", "speed", "report"))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--figures", type=Path, default=FIGURES, help="for report")
    given = runner.parse(parser, arguments)
    if given.what == "train":
        train_all(given.csv, given.tasks, given.seeds)
    elif given.what == "speed":
        time_all(given)
    else:
        runs = read_runs(given.figures / "which_lstm_runs.csv")
        with (given.figures / "which_lstm_speed.csv").open(newline="", encoding="utf-8") as file:
            rows = summary(runs, [*csv.DictReader(file)])
        runner.write(rows, given.figures / "which_lstm.csv")
        draw(rows, given.figures / "which_lstm.png")
        print_table(rows)


if __name__ == "__main__":
    main()
