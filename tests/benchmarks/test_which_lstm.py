"""The comparison of LSTM equations trains, resumes, and reports what its table says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from cli_support import rows_of
from torch import nn

from benchmarks import which_lstm
from benchmarks.which_lstm import EQUATIONS, Examples, Network, Run, Task, best_rate
from ln_zoo.norms import Identity


def tiny(name: str) -> Task:
    torch.manual_seed(0)
    x = {"pixels": torch.rand(5, 12, 1), "characters": torch.randint(3, (5, 12))}[name]
    last = name == "pixels"
    y = torch.randint(3, (12,) if last else (5, 12))
    sets = dict.fromkeys(("train", "val", "test"), Examples(x, y))
    encoder = partial(nn.Linear, 1, 8) if last else partial(nn.Embedding, 3, 8)
    return Task(name, sets, 8, encoder, 3, 4, 2, last=last)


def run(equations: str, rate: float, seed: int, val: float, score: float = 0.0) -> Run:
    return Run("pixels", equations, rate, seed, val, score, 1.0, 2, 9, "2026-11-29")


@pytest.mark.parametrize("name", EQUATIONS)
def test_norms_act_inside_the_recurrence_or_around_the_layer(name: str) -> None:
    network = Network(nn.Linear(1, 8), EQUATIONS[name], 8, 3)
    sites = [site for site in network.rnn.modules() if hasattr(site, "norm")]
    inside = any(not isinstance(site.norm, Identity) for site in sites)
    outside = isinstance(network.before, nn.LayerNorm), isinstance(network.after, nn.LayerNorm)
    assert outside == ("pre-norm" in name,) * 2
    assert inside == (name != "none" and "pre-norm" not in name)
    f = network.rnn.bias_ih_l0.chunk(4)[1]
    assert f.eq(1).all()


def test_runs_resume_and_the_report_has_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("none", "joint")
    monkeypatch.setattr(which_lstm, "EQUATIONS", {name: EQUATIONS[name] for name in names})
    monkeypatch.setattr(
        which_lstm, "TASKS", {n: partial(tiny, n) for n in ("pixels", "characters")}
    )
    monkeypatch.setattr(which_lstm, "SCORES", {"pixels": "%", "characters": "bits"})
    runs, speed = (tmp_path / f"which_lstm_{what}.csv" for what in ("runs", "speed"))
    train = ["train", f"--csv={runs}", "--tasks", "pixels", "characters", "--seeds=2"]
    which_lstm.main(train)
    found = rows_of(runs)
    assert len(found) == 2 * 2 * (2 + 1)
    monkeypatch.setattr(which_lstm, "train", lambda *_: pytest.fail("trained again"))
    which_lstm.main(train)
    assert rows_of(runs) == found
    tasks = ["--tasks", "pixels", "characters"]
    which_lstm.main(["speed", f"--csv={speed}", "--rounds=1", "--seconds=0.01", *tasks])
    which_lstm.main(["report", f"--figures={tmp_path}"])
    table = rows_of(tmp_path / "which_lstm.csv")
    assert [(row["task"], row["equations"]) for row in table] == [
        (task, name) for task in ("pixels", "characters") for name in names
    ]
    for row in table:
        own = [
            float(r["test_score"])
            for r in found
            if (r["task"], r["equations"]) == (row["task"], row["equations"])
            and float(r["rate"]) == float(row["rate"])
        ]
        assert row["seeds"] == "2" == str(len(own))
        assert float(row["score"]) == pytest.approx(sum(own) / 2, rel=1e-4)
    assert (tmp_path / "which_lstm.png").stat().st_size > 1000
    assert "| joint |" in capsys.readouterr().out


def test_the_best_rate_is_that_of_validation_with_seed_0() -> None:
    runs = [run("none", 0.01, 0, 1.5), run("none", 0.003, 0, 1.2), run("none", 0.01, 1, 0.1)]
    runs.append(run("none", 0.03, 0, float("nan")))
    assert best_rate(runs, "pixels", "none") == 0.003


def test_scores_are_accuracy_bits_or_nats() -> None:
    task = tiny("characters")
    network = task.network(EQUATIONS["none"])
    nats, bits = task.score(network, "val")
    assert bits == pytest.approx(nats / 0.6931472, rel=1e-5)
    task = tiny("pixels")
    nats, percent = task.score(network := task.network(EQUATIONS["none"]), "val")
    x, y = task.sets["val"]
    assert percent == pytest.approx(100 * network(x, True).argmax(-1).eq(y).float().mean().item())
