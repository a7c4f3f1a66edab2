"""Learning curves of several runs: how they are read and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from cli_support import rows_of
from matplotlib.figure import Figure
from sweep_runs import METRICS, write_run, write_steps

from ln_zoo.cli import main
from ln_zoo.plots import comparison as compare
from ln_zoo.plots.comparison import LoggedRun, draw, groups, median_and_range, read_run
from ln_zoo.plots.figures import set_log_scale
from ln_zoo.sweeps.speed import steps_to


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, *_, **__: figures.append(figure))
    return figures


def run_of(folder: Path, values: list[float], label: str = "A") -> LoggedRun:
    return read_run(f"{label}={write_run(folder / 'version_0', values)}", METRICS)


def test_spread_over_runs_of_a_label(tmp_path: Path) -> None:
    seeds = [[0.1, 0.04], [0.2, 0.01], [0.6, 0.02, 0.001]]
    runs = [run_of(tmp_path / str(i), values, "LN") for i, values in enumerate(seeds)]
    assert list(groups(runs)) == ["LN"]
    # Epochs count from 1, and end where the shortest run does.
    assert median_and_range(runs, "epoch_train_nll") == [(1, 0.2, 0.1, 0.6), (2, 0.02, 0.01, 0.04)]


def test_against_seconds(tmp_path: Path, seen: list[Figure]) -> None:
    """Runs of a label that differ in speed meet at the same updates; what is between is in line."""
    for number, pace in enumerate((0.5, 0.7)):
        rows = ["epoch,step,step_seconds,step_val_nll,step_mr"]
        rows += [f"0,{step},{step * pace},{1 / (1 + step)}," for step in (0, 10, 20)]
        rows += ["0,0,,,50", "0,15,,,60"]
        folder = tmp_path / f"LN/version_{number}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    texts = [str(path) for path in sorted((tmp_path / "LN").iterdir())]
    metrics, table = ["step_val_nll", "step_mr"], tmp_path / "seconds.csv"
    command = ["compare", *texts, "--x", "seconds", "--metric", *metrics, "--csv", str(table)]
    assert main([*command, "--out", str(tmp_path / "a.png")]) == 0
    nll, task = seen[0].axes
    assert list(nll.lines[0].get_xdata()) == pytest.approx([0, 6, 12])
    assert list(nll.lines[2].get_xdata()) == pytest.approx([0, 7, 14])
    assert list(task.lines[1].get_xdata()) == pytest.approx([0, 7.5])
    assert nll.get_xlabel() == "seconds of training"
    found = {(row["run"], row["step"]): row for row in rows_of(table)}
    assert found["1", "15"] == {
        "label": "LN", "run": "1", "step": "15", "seconds": "10.5", "step_val_nll": "",
        "step_mr": "60",
    }  # fmt: skip
    without = write_run(tmp_path / "b/version_0", [0.1])
    command = ["compare", str(without), "--x", "seconds", "--metric", "epoch_train_nll"]
    assert main([*command, "--out", str(tmp_path / "b.png")]) != 0


def test_axes(tmp_path: Path, seen: list[Figure]) -> None:
    """Logarithms of updates where asked for, of likelihoods where they are positive."""
    for number, values in enumerate(([0.3, 0.1], [0.3, -0.1])):
        run = run_of(tmp_path / str(number), values)
        for log_x in (False, True):
            draw([run], METRICS, tmp_path / "a.png", log_x=log_x)
    scales = [(figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) for figure in seen]
    assert scales == [("linear", "log"), ("log", "log"), ("linear", "linear"), ("log", "linear")]


def test_narrow_ranges_are_linear_and_epochs_whole(tmp_path: Path, seen: list[Figure]) -> None:
    run = run_of(tmp_path, [1.42, 1.35, 1.3])
    draw([run], METRICS, tmp_path / "a.png")
    for axis in seen[0].axes:
        assert axis.get_yscale() == "linear"
        assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_dashes_of_lines_on_others_and_rows_of_panels(tmp_path: Path, seen: list[Figure]) -> None:
    values = {"A": [0.5, 0.3, 0.1], "B": [0.5, 0.4, 0.1], "C": [0.5, 0.3003, 0.1]}
    runs = [run_of(tmp_path / label, found, label) for label, found in values.items()]
    draw(runs, METRICS, tmp_path / "a.png")
    assert [line.is_dashed() for line in seen[0].axes[0].get_lines()] == [False, False, True]
    draw(runs, METRICS * 3, tmp_path / "a.png")
    rows = [axis.get_subplotspec().rowspan.start for axis in seen[1].axes]
    assert rows == [0] * 3 + [1] * 3


@pytest.mark.parametrize(("labels", "legends"), [(4, (1, 0)), (5, (0, 1))])
def test_many_labels_do_not_hide_the_curves(
    tmp_path: Path, seen: list[Figure], labels: int, legends: tuple[int, int]
) -> None:
    runs = [run_of(tmp_path / str(i), [0.3, 0.1], str(i)) for i in range(labels)]
    draw(runs, METRICS, tmp_path / "a.png")
    inside = sum(axis.get_legend() is not None for axis in seen[0].axes)
    assert (inside, len(seen[0].legends)) == legends


def test_long_labels_stay_in_the_picture(tmp_path: Path, seen: list[Figure]) -> None:
    label = "layer norm, no input site, 1e-{}"
    runs = [run_of(tmp_path / str(n), [0.3, 0.1], label.format(n)) for n in range(9)]
    draw(runs, METRICS, tmp_path / "a.png")
    (legend,) = seen[0].legends
    assert legend.get_window_extent().width <= seen[0].bbox.width
    assert len(legend.get_texts()) == 9


def test_what_a_log_axis_leaves_out_stretches_no_other(tmp_path: Path, seen: list[Figure]) -> None:
    runs = [run_of(tmp_path / str(i), [0.3, -0.1]) for i in range(2)]
    for run in runs:
        for metric in METRICS:
            run.curves[metric][0] = 1e6
    for log_x in (False, True):
        draw(runs, METRICS, tmp_path / "a.png", log_x=log_x)
    highest = [figure.axes[0].get_ylim()[1] for figure in seen]
    assert highest[0] > 1e6
    assert highest[1] < 1


def test_updates_are_counted_as_they_were_done(tmp_path: Path) -> None:
    """What Lightning logs at step 4 belongs to the fifth update."""
    folder = write_steps(tmp_path / "m/version_0", {0: 2.3, 5: 1.0})
    run = read_run(str(folder), ["step_train_nll", "train_loss"], "step")
    assert run.curves == {"step_train_nll": {0: 2.3, 5: 1.0}, "train_loss": {1: 0.5, 6: 0.5}}
    of_epochs = write_run(tmp_path / "n/version_0", [0.1, 0.05])
    run = read_run(str(of_epochs), ["epoch_train_nll"], "step")
    assert run.curves == {"epoch_train_nll": {11: 0.1, 21: 0.05}}
    # Another metric stands in where one was not logged.
    one, two = (write_run(tmp_path / f"{i}/version_0", [0.1, 0.05]) for i in range(2))
    file = one / "metrics.csv"
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([f"{head},other", *(f"{row},0.7" for row in rows)]))
    metric = "other|epoch_train_nll"
    assert read_run(str(one), [metric]).curves[metric] == {1: 0.7, 2: 0.7}
    assert read_run(str(two), [metric]).curves[metric] == {1: 0.1, 2: 0.05}


@pytest.mark.parametrize(
    ("metric", "scores", "value", "expected"),
    [
        ("val_accuracy", {0: 0.1, 5: 0.9, 10: 0.8, 15: 0.95}, 0.9, 5),
        ("step_train_error", {0: 0.9, 5: 0.0, 10: 0.1}, 0.0, 5),
        ("step_train_nll", {0: float("nan"), 5: float("nan"), 10: 0.1}, 0.5, 10),
        ("my_own_loss", {5: 3.0, 10: 2.0}, 1.0, float("inf")),
    ],
)
def test_first_beyond(metric: str, scores: dict[int, float], value: float, expected: float) -> None:
    assert steps_to(scores, metric, value) == expected


def labels(values: list[float], direction: Literal["x", "y"] = "y") -> list[str]:
    figure = Figure()
    axes = figure.subplots()
    axes.plot(values, values)
    set_log_scale(axes, direction)
    figure.draw_without_rendering()
    axis = axes.xaxis if direction == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    kinds = [(axis.get_ticklocs(minor=m), axis.get_ticklabels(minor=m)) for m in (False, True)]
    ticks = [tick for each in kinds for tick in zip(*each, strict=True)]
    return [t.get_text() for place, t in ticks if low <= place <= high and t.get_text()]


def test_less_than_a_power_of_ten_is_labelled_with_plain_numbers() -> None:
    for values in ([3.9, 9.1], [0.021, 0.18]):
        assert len([float(each) for each in labels(values)]) >= 5
    assert all("10" in each for each in labels([1e-8, 1.0]))


def test_updates_of_two_decades_have_labels_with_room_between() -> None:
    assert labels([200, 7800], "x") == ["200", "500", "1000", "2000", "5000"]
