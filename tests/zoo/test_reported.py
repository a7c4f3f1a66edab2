"""The data file of reported numbers, and laying measurements beside them."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ln_zoo.norms
from ln_zoo.utils.package_data import read_data
from ln_zoo.zoo import reading
from ln_zoo.zoo.reported import (
    Citation,
    citations,
    cited_for,
    comparison,
    measured_on,
    render,
    reported,
)

FULL_DRAW = {
    "glimpses": 64, "hidden_size": 256, "latent_size": 100, "read_size": 2, "write_size": 5,
}  # fmt: skip
PIXELS = {"step_features": 1, "permuted": True, "hidden_size": 100, "batch_size": 100}
LINES = {
    "hidden_size": 400, "num_layers": 3, "mixture_components": 20, "window_components": 10,
    "peephole": True, "length_mode": "full", "scale": "std",
}  # fmt: skip


# The file


def test_every_number_equals_its_second_copy() -> None:
    """``reported_numbers.csv`` has the numbers again, one per row."""
    copy = Path(__file__).with_name("reported_numbers.csv")
    expected = list(csv.DictReader(copy.read_text(encoding="utf-8").splitlines()))
    names = ("source", "place", "model", "norm", "method", "metric", "data")
    found = [
        {name: getattr(r, name) or "" for name in names}
        | {"training": " ".join(f"{number} {unit}" for unit, number in r.training.items())}
        | {"value": f"{r.value:g}"}
        for r in reported()
    ]
    assert found == expected


def test_lookup() -> None:
    assert reported(model="DRAW") == [r for r in reported() if r.model == "DRAW"]
    assert {r.norm for r in reported(norm="BatchNorm")} == {"BatchNorm"}
    (draw,) = reported(model="DRAW", norm="LayerNorm", metric="bound")
    assert draw.size == FULL_DRAW
    rows = [r for r in reported(metric="accuracy") if r.method == "BN-LSTM" and r.split == "test"]
    assert {r.size["permuted"]: r.value for r in rows} == {False: 99.0, True: 95.4}
    # Runs without a printed number have no entry.
    assert reported(model="MLPClassifier") == reported(model="DRAW", norm="RMSNorm") == []
    assert {r.source for r in reported(model="ConvClassifier")} == {"salimans2016"}
    assert [r.norm for r in reported(model="Handwriting") if r.source == "ba2016"] == []


def test_every_entry_is_complete_and_named_as_the_library_names_it() -> None:
    file = read_data("zoo/reported.yaml")
    cited, metrics = file["cited"], file["metrics"]
    norms = {r.norm for r in reported()} | {*cited["norms"], *cited["recurrent_norms"]}
    assert norms - {None} <= set(ln_zoo.norms.__all__)
    models = {r.model for r in reported()} | {*cited["models"], *cited["recurrent_models"]}
    assert models - {None} <= reading.MODELS.keys()
    seen = set()
    for r in reported():
        assert all((r.method, r.place, r.dataset, r.split, citations()[r.source].short))
        metric = metrics[r.metric]
        assert (r.unit, r.higher_is_better) == (metric["unit"], metric["higher_is_better"])
        assert math.isfinite(r.value)
        assert r.unit != "%" or 0 < r.value < 100
        assert len(r.training) <= 1
        assert all(k in ("epochs", "updates") and n > 0 for k, n in r.training.items())
        key = (r.source, r.place, r.model, r.method, r.metric, r.data, repr((r.size, r.training)))
        assert key not in seen, key
        seen.add(key)
    assert all(c.arxiv or c.venue for c in citations().values())
    # `MetricUnit.scale` knows no other pair of units.
    scaled = {(m["logged"], m["unit"]) for m in metrics.values() if "logged" in m}
    assert scaled == {("fraction", "%")}
    used = {r.source for r in reported()} | {*cited["always"]}
    for uses in ("models", "norms", "recurrent_norms", "datasets"):
        used |= {key for keys in cited[uses].values() for key in keys}
    assert used == set(citations())
    # Ours, which no source reports.
    ours = (
        "importance_bound kl point_nll caption_sum image_sum recall_sum entity_error passage_error "
        "next_nll previous_nll token_nll cr_fast mpqa_fast mr_fast subj_fast"
    )
    assert {r.metric for r in reported()} | {*ours.split()} == set(metrics)


def test_metrics_with_data_of_their_own() -> None:
    facts = {"dataset": "books"}
    assert measured_on(facts, metric="test_mr") == "MR/10-fold"
    assert measured_on(facts, metric="token_nll") == "books/test"
    measured, size = {"test_mr": 70.0}, {"updates": 10_000}
    rows = comparison("SkipThought", "LayerNorm", measured, data="books/test", size=size)
    assert {row.reported.data for row in rows if row.reported} == {"MR/10-fold"}
    assert all(row.outcome.startswith("not comparable: training_data") for row in rows)


# Whom to cite


@pytest.mark.parametrize(
    ("model", "norm", "dataset", "keys"),
    [
        ("MLPClassifier", "Identity", "mnist", "ba2016 lecun1998"),
        ("MLPClassifier", "BatchNorm", "digits", "ba2016 ioffe2015 alpaydin1998"),
        ("MLPClassifier", "WeightNorm", "mnist", "ba2016 salimans2016 lecun1998"),
        ("DRAW", "LayerNorm", "binarized_mnist", "ba2016 gregor2015 lecun1998 larochelle2011"),
        ("Handwriting", "BatchNorm", "iam_ondb",
         "ba2016 graves2013 ioffe2015 cooijmans2017 liwicki2005"),
        ("Mine", "my.Norm", "mine", "ba2016"),
    ],
)  # fmt: skip
def test_whom_a_card_cites(model: str, norm: str, dataset: str, keys: str) -> None:
    assert [c.key for c in cited_for(model, norm, dataset)] == keys.split()


def test_publications_without_arxiv() -> None:
    laurent = citations()["laurent2017"]
    assert laurent.short == "Laurent et al. 2017"
    assert str(laurent) == "Laurent, Ballas, Vincent (2017): Recurrent Normalization Propagation"
    assert "author = {Laurent, César and Ballas, Nicolas and Vincent, Pascal}" in laurent.bibtex
    assert "eprint" not in laurent.bibtex
    assert "url = {https://e}" in Citation("a", ("B, C",), 2000, "D", url="https://e").bibtex


# Comparison


def draw(
    norm: str = "LayerNorm", value: float = 83.0, obstacles: tuple[str, ...] = (), **size: Any
) -> list[Any]:
    given = {"data": "binarized_mnist/test", "size": FULL_DRAW | size, "obstacles": obstacles}
    return comparison("DRAW", norm, {"test_bound": value}, **given)


def writer(measured: dict[str, float], data: str = "IAMOnDB/validation", **changed: Any) -> list:
    return comparison("Handwriting", "Identity", measured, data=data, size=LINES | changed)


def test_same_data_size_and_training_give_a_difference() -> None:
    (row,) = draw(epochs=200, lr=1e-3)
    assert (row.metric, row.measured, row.unit) == ("bound", 83.0, "nats/image")
    assert row.reported.value == 82.09
    assert row.difference == pytest.approx(0.91)
    assert row.reason == row.at == ""
    *_, source, difference = row.cells()
    assert source.startswith("82.09 nats/image (layer normalisation; Ba et al. 2016, section 6")
    assert "BinarizedMNIST/test" in source
    assert difference == "+0.91 nats/image"


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"epochs": 15}, "0.91 nats/image behind at 15 of 200 epochs"),
        ({"epochs": 15, "value": 82.0}, "0.09 nats/image ahead at 15 of 200 epochs"),
        ({"epochs": 15, "value": 82.09}, "equal at 15 of 200 epochs"),
        ({"epochs": 15, "glimpses": 32}, "not comparable: glimpses 32 here, 64 there"),
        ({}, "not comparable: epochs not stated here, 200 there"),
        (
            {"epochs": 200, "obstacles": ["a part of the test set here"]},
            "not comparable: a part of the test set here",
        ),
    ],
)
def test_outcomes(given: dict[str, Any], outcome: str) -> None:
    assert [row.outcome for row in draw(**given)] == [outcome]


def test_more_accuracy_is_better() -> None:
    (row,) = comparison(
        "SequenceClassifier", "BatchNorm", {"accuracy": 0.8818}, data="mnist/test",
        size=PIXELS | {"epochs": 10},
    )  # fmt: skip
    assert row.outcome == "7.22 points behind at 10 of 200 epochs"


def test_a_curve_is_compared_at_the_runs_length_or_on_both_sides_of_it() -> None:
    def compared(updates: int, **size: Any) -> list[str]:
        rows = comparison(
            "SequenceClassifier", "Identity", {"val_accuracy": 0.7, "accuracy": 0.7},
            data="mnist/validation", size=PIXELS | {"updates": updates} | size,
        )  # fmt: skip
        assert rows[0].reported is None  # "val_accuracy" is not a metric of the file
        return [row.outcome for row in rows[1:]]

    assert compared(5000) == ["+4.6 points"]
    assert compared(6000) == [
        "4.6 points ahead at 6,000 of 5,000 updates",
        "7.6 points behind at 6,000 of 10,000 updates",
    ]
    assert compared(500) == ["22.3 points ahead at 500 of 1,000 updates"]
    assert compared(10**6) == ["20.2 points behind at 1,000,000 of 100,000 updates"]
    # What cannot be compared is told once for the whole curve.
    assert compared(5000, batch_size=64) == ["not comparable: batch_size 64 here, 100 there"]


def test_facts_that_are_stated_rule_nothing_out() -> None:
    def outcome(**changed: Any) -> str:
        return writer({"sequence_nll": -1000.0}, "iam_ondb/validation", **changed)[0].outcome

    assert outcome() == "+96.9 nats/sequence"
    assert outcome(peephole=False) == "+96.9 nats/sequence (peephole False here, True there)"
    assert outcome(length_mode="crop").startswith("not comparable: length_mode crop here")


def test_only_numbers_for_the_same_data_and_split_count() -> None:
    for data in ("IAMOnDB/test", "IAMOnDB/train", "mine/validation"):
        (row,) = writer({"sequence_nll": -1.0}, data)
        assert row.cells() == ("sequence_nll", "-1 nats/sequence", "", "")


def test_fractions_stand_beside_percentages() -> None:
    size = {"hidden_size": 120}
    rows = comparison("AttentiveReader", "Identity", {"error": 0.461}, data="CNN/test", size=size)
    assert [(r.measured, r.unit) for r in rows] == [(pytest.approx(46.1), "%")]
    assert rows[0].difference == pytest.approx(1.1)
    assert rows[0].cells()[1::2] == ("46.1 %", "+1.1 points")


def test_every_comparable_number_gets_a_row() -> None:
    size = {
        "training_data": "coco", "embedding_features": 300, "hidden_size": 1024,
        "image_features": 4096, "measure": "order", "fold_size": 1000,
    }  # fmt: skip

    def compared(**changed: Any) -> list[Any]:
        measured, facts = {"caption_r1": 40.0}, size | changed
        return comparison("OrderEmbedding", "Identity", measured, data="COCO/test-1k", size=facts)

    assert [r.reported.value for r in compared()] == [46.7, 46.6]
    assert [r.difference for r in compared()] == [pytest.approx(-6.7), pytest.approx(-6.6)]
    (symmetric,) = compared(measure="cosine")
    assert symmetric.reported.value == 45.4
    # Two sources that nothing keeps from being compared: neither goes first.
    outcomes = [row.outcome for row in draw("Identity", epochs=200, batch_size=128)]
    assert outcomes == ["+0.64 nats/image", "-1.3 nats/image"]
    # Both have one obstacle.
    rows = draw("Identity", epochs=200, batch_size=128, latent_size=50)
    assert [row.reported.value for row in rows] == [82.36, 84.3]


def test_another_size_is_not_comparable() -> None:
    for size, here in (({"hidden_size": 64}, "64"), ({}, "not stated")):
        measured = {"error": 0.4}
        (row,) = comparison("AttentiveReader", "Identity", measured, data="CNN/test", size=size)
        assert (row.difference, row.reported.value) == (None, 45.0)
        assert row.reason == f"not comparable: hidden_size {here} here, 120 there"


def test_nothing_reported() -> None:
    (row,) = comparison("MLPClassifier", "my_norm.MyNorm", {"error": 0.02}, data="a/test", size={})
    assert (row.reported, row.cells()) == (None, ("error", "2 %", "", ""))
    (row,) = comparison("DRAW", "LayerNorm", {"clamped": 0.5}, data="a/test", size={})
    assert row.cells() == ("clamped", "0.5", "", "")


def printed(*arguments: Any, width: int = 600, **named: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(*arguments, **named))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table() -> None:
    rows = draw(epochs=200, image_size=[28, 28], read_size=[2, 2])
    text = printed([*rows, *draw("RMSNorm", 90.0)], title="on images")
    assert "on images" in text
    head, body, below = text.partition("┡")[0], *text.partition("┡")[2].split("└")
    for word in ("metric", "unit", "measured", "reported", "difference"):
        assert word in head
    assert [body.count(word) for word in ("82.09 [1]", "nats/image")] == [1, 2]
    assert "not comparable" in body
    # Sizes stand in square brackets, which rich would take for markup.
    notes = " ".join(below.split())
    assert "[1] layer normalisation; Ba et al. 2016, section 6.4; BinarizedMNIST/test; " in notes
    assert "not comparable: read_size [2, 2] here, 2 there" in notes
    assert "[2]" not in notes


def test_a_table_fits_into_a_narrow_terminal() -> None:
    """Where each number is from, and what differs, stands below; rows from one place share it."""
    measured = {"sequence_nll": -1056.5, "point_nll": -1.7176, "sse": 0.49615}
    rows = writer(measured, peephole=False)
    text = printed(rows, card=measured, note="A note.", width=80)
    body, below = text.split("└")
    assert max(map(len, text.splitlines())) <= 80
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in body.splitlines()[3:]]
    assert cells[:3] == [
        ["sequence_nll", "nats/sequence", "-1056.5", "-1056.5", "-1096.9 [1]", "+40.4"],
        ["point_nll", "nats/point", "-1.7176", "-1.7176", "", ""],
        ["sse", "squared", "0.49615", "0.49615", "0.23 [1]", "+0.2661"],
    ]
    assert cells[3:] == [["", "offset", "", "", "", ""]]
    notes = " ".join(below.split("[1]")[1].split())
    assert notes.startswith("synthesis network; Graves 2013, table of handwriting synthesis")
    assert notes.endswith("IAMOnDB/validation; peephole False here, True there A note.")


def test_a_table_without_reported_numbers_has_two_columns() -> None:
    rows = draw("RMSNorm", 90.0)
    text = printed(rows)
    assert [word in text for word in ("measured", "reported", "difference")] == [True, False, False]
    text = printed(rows, card={"bound": 90.12345, "kl": 3.0})
    assert [word in text for word in (" 90.123 ", "card", "kl")] == [True, True, False]
