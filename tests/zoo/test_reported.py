"""The data file of reported numbers, and laying measurements beside them."""

from __future__ import annotations

import copy
import io
from importlib.resources import files
from typing import Any

import pytest
import yaml
from rich.console import Console

import ln_zoo.norms
from ln_zoo.zoo import registry
from ln_zoo.zoo.reported import (
    Citation,
    Reported,
    citations,
    cited_for,
    comparison,
    measured_on,
    metric_unit,
    parse,
    render,
    reported,
)

FULL_DRAW = {
    "glimpses": 64, "hidden_size": 256, "latent_size": 100, "read_size": 2,
    "write_size": 5,
}  # fmt: skip
PIXELS = {"step_features": 1, "permuted": True, "hidden_size": 100, "batch_size": 100}
LINES = {
    "hidden_size": 400, "num_layers": 3, "mixture_components": 20, "window_components": 10,
    "peephole": True, "length_mode": "full", "scale": "std",
}  # fmt: skip


@pytest.fixture
def raw() -> Any:
    text = files("ln_zoo.zoo").joinpath("reported.yaml").read_text(encoding="utf-8")
    return copy.deepcopy(yaml.safe_load(text))


def one(**wanted: Any) -> Reported:
    (found,) = [
        r for r in reported() if all(getattr(r, key) == value for key, value in wanted.items())
    ]
    return found


def values(method: str, *metrics: str, **wanted: Any) -> list[float]:
    return [one(method=method, metric=metric, **wanted).value for metric in metrics]


# Numbers, typed here again from the sources' tables


def test_order_embeddings_table_2() -> None:
    metrics = ("r1", "r5", "r10", "mean_rank")
    columns = [f"{side}_{metric}" for side in ("caption", "image") for metric in metrics]
    table: dict[str, list[float | None]] = {
        "symmetric similarity (Vendrov et al.)": [45.4, None, 88.7, 5.8, 36.3, None, 85.8, 9.0],
        "order embeddings (Vendrov et al.)": [46.7, None, 88.9, 5.7, 37.9, None, 85.9, 8.1],
        "order embeddings, the authors' own run": [46.6, 79.3, 89.1, 5.2, 37.8, 73.6, 85.7, 7.9],
        "order embeddings with layer normalisation": [48.5, 80.6, 89.8, 5.1, 38.9, 74.3, 86.3, 7.6],
    }
    for method, row in table.items():
        found = {r.metric: r.value for r in reported(model="OrderEmbedding") if r.method == method
                 and r.place == "Table 2, section 6.1"}  # fmt: skip
        # A dash of the table has no entry.
        assert [found.get(column) for column in columns] == row
    layer_norm = reported(model="OrderEmbedding", norm="LayerNorm", metric="image_r1")
    assert [(r.value, r.data) for r in layer_norm] == [(38.9, "COCO/test-1k")]


def test_skip_thoughts_table_3() -> None:
    columns = ["sick_pearson", "sick_spearman", "sick_mse", "mr", "cr", "subj", "mpqa"]
    table = [
        ("Identity", [0.848, 0.778, 0.287, 75.5, 79.3, 92.1, 86.9]),
        ("Identity", [0.842, 0.767, 0.298, 77.3, 81.8, 92.6, 87.9]),
        ("LayerNorm", [0.854, 0.785, 0.277, 79.5, 82.6, 93.4, 89.0]),
        ("LayerNorm", [0.858, 0.788, 0.270, 79.4, 83.1, 93.7, 89.3]),
    ]
    entries = [r for r in reported(model="SkipThought") if r.place == "Table 3, section 6.3"]
    rows = [entries[i : i + 7] for i in range(0, len(entries), 7)]
    assert [(row[0].norm, [r.value for r in row]) for row in rows] == table
    assert all([r.metric for r in row] == columns for row in rows)


def test_draw_and_handwriting() -> None:
    assert one(model="DRAW", norm="Identity", source="ba2016").value == 82.36
    layer_norm = one(model="DRAW", norm="LayerNorm", metric="bound")
    assert (layer_norm.value, layer_norm.unit) == (82.09, "nats/image")
    assert (layer_norm.size["glimpses"], layer_norm.training) == (64, {"epochs": 200})
    assert values("synthesis network", "sequence_nll", "sse") == [-1096.9, 0.23]
    noisy = values("synthesis network, adaptive weight noise", "sequence_nll")
    assert noisy == [-1128.2]
    entries = reported(model="Handwriting", metric="sequence_nll")
    prediction = [r.value for r in entries if r.method.startswith("prediction network")]
    assert prediction == [-1025.7, -1041.0, -1057.7]


def test_recurrent_batch_normalisation() -> None:
    pixels = {
        "TANH-RNN": (35.0, 35.0),
        "iRNN": (97.0, 82.0),
        "uRNN": (95.1, 91.4),
        "sTANH-RNN": (98.1, 94.0),
        "LSTM": (98.9, 90.2),
        "BN-LSTM": (99.0, 95.4),
    }
    for method, (in_order, permuted) in pixels.items():
        rows = reported(model="SequenceClassifier", metric="accuracy")
        by_order = {
            r.size["permuted"]: r.value for r in rows if (r.method, r.split) == (method, "test")
        }
        assert by_order == {False: in_order, True: permuted}
    treebank = {
        "HF-MRNN": 1.41,
        "norm-stabilised LSTM": 1.39,
        "ME n-gram": 1.37,
        "LSTM": 1.38,
        "BN-LSTM": 1.32,
        "Zoneout": 1.27,
        "HM-LSTM": 1.24,
        "HyperNetworks": 1.22,
    }
    for method, bpc in treebank.items():
        data = {"dataset": "Penn Treebank characters", "split": "test"}
        assert one(method=method, **data).value == bpc
    text8 = [r.value for r in reported(metric="bpc") if r.dataset == "text8"]
    assert text8 == [1.63, 1.54, 1.48, 1.29, 1.43, 1.36]
    by_length = [
        r.value
        for r in reported(metric="bpc", norm="BatchNorm")
        if r.method == "BN-LSTM, population statistics"
    ]
    assert by_length == [1.398, 1.348, 1.338, 1.333]


def test_attentive_reader() -> None:
    top4 = [r for r in reported(model="AttentiveReader") if r.dataset == "CNN top4"]
    assert [r.value for r in top4] == [50.3, 49.5, 50.0, 47.1, 43.9]
    assert all(r.place.startswith("text") for r in top4)
    assert not any("figure" in r.place or "read from" in r.note for r in top4)
    full = [(r.split, r.value) for r in reported(model="AttentiveReader") if r.dataset == "CNN"]
    assert full == [
        ("validation", 38.4),
        ("test", 37.0),
        ("validation", 45.5),
        ("test", 45.0),
        ("validation", 37.9),
        ("test", 36.3),
    ]


def test_runs_without_a_printed_number_have_no_entry() -> None:
    assert reported(model="MLPClassifier") == []
    assert {r.source for r in reported(model="ConvClassifier")} == {"salimans2016"}
    assert [r.norm for r in reported(model="Handwriting") if r.source == "ba2016"] == []


def test_ratios_of_speed() -> None:
    ratios = {r.model: (r.norm, r.value) for r in reported(metric="time_to_best")}
    assert ratios == {"OrderEmbedding": ("LayerNorm", 0.60), "DRAW": ("LayerNorm", 0.5)}


def test_curves_of_pixel_by_pixel_mnist() -> None:
    curve = [r for r in reported(model="SequenceClassifier") if "updates" in r.training]
    points = {(r.norm, r.size["permuted"], r.training["updates"]): r.value for r in curve}
    assert len(points) == len(curve) == 28
    assert {r.data for r in curve} == {"MNIST/validation"}
    assert (points["Identity", True, 5000], points["BatchNorm", True, 5000]) == (65.4, 84.7)
    assert (points["Identity", False, 60_000], points["BatchNorm", False, 1000]) == (98.5, 75.7)


def test_later_references() -> None:
    draw = {r.method: r.value for r in reported(model="DRAW") if r.source == "laurent2017"}
    assert draw == {
        "baseline": 84.30, "weight normalisation": 81.98, "normalisation propagation": 81.17,
    }  # fmt: skip
    characters = [r for r in reported(metric="bpc") if r.split == "validation-length-100"]
    assert [r.value for r in characters] == [1.455, 1.438, 1.433, 1.439, 1.422]
    assert [r.value for r in reported(metric="seconds_per_epoch")] == [386, 402, 545, 530, 413]
    skip = [r.value for r in reported(norm="LayerNorm") if r.split == "SentEval"]
    assert skip == [79.4, 83.1, 89.3, 93.7, 82.9, 88.4, 85.8, 79.5, 73.2, 68.9]
    generative = {r.method: r.value for r in reported(metric="bound") if r.model is None}
    assert generative["DRAW of Gregor et al."] == 80.97
    assert generative["NADE"] == 88.33
    assert generative["DRAW without attention"] == 87.40
    reading = {
        (r.method, r.split): r.value for r in reported(metric="accuracy") if r.dataset == "CNN"
    }
    assert (reading["BiDAF", "test"], reading["ReasoNet", "validation"]) == (76.9, 72.9)


# Schema


def test_every_entry_is_complete_and_named_as_the_library_names_it(raw: Any) -> None:
    norms = {r.norm for r in reported()} | cited_norms(raw)
    assert norms - {None} <= set(ln_zoo.norms.__all__)
    models = {r.model for r in reported()} | {*raw["cited"]["models"]}
    models |= {*raw["cited"]["recurrent_models"]}
    assert models - {None} <= registry.model_classes().keys()
    for r in reported():
        assert r.method
        assert r.place
        assert r.dataset
        assert r.split
        assert citations()[r.source].short
        unit = metric_unit(r.metric)
        assert unit is not None
        assert (unit.unit, unit.higher_is_better) == (r.unit, r.higher_is_better)
        if r.unit == "%" and r.value is not None:
            assert 0 < r.value < 100
    used = {r.source for r in reported()} | {*raw["cited"]["always"]}
    for uses in ("models", "norms", "recurrent_norms", "datasets"):
        used |= {key for keys in raw["cited"][uses].values() for key in keys}
    assert used == set(citations())
    # Ours, which no source reports.
    measured_alone = {"importance_bound", "kl", "point_nll"}
    measured_alone |= {"caption_sum", "image_sum", "recall_sum"}
    measured_alone |= {"entity_error", "passage_error"}
    measured_alone |= {"next_nll", "previous_nll", "token_nll"}
    measured_alone |= {"cr_fast", "mpqa_fast", "mr_fast", "subj_fast"}
    assert {r.metric for r in reported()} | measured_alone == set(raw["metrics"])


def test_metrics_with_data_of_their_own() -> None:
    facts = {"dataset": "books"}
    assert measured_on(facts, metric="test_mr") == "MR/10-fold"
    assert measured_on(facts, metric="token_nll") == "books/test"
    rows = comparison(
        "SkipThought", "LayerNorm", {"test_mr": 70.0}, data="books/test", size={"updates": 10_000}
    )
    assert {row.reported.data for row in rows if row.reported} == {"MR/10-fold"}
    assert all(row.outcome.startswith("not comparable: training_data") for row in rows)


def test_lookup_filters() -> None:
    assert reported(model="DRAW") == [r for r in reported() if r.model == "DRAW"]
    assert {r.norm for r in reported(norm="BatchNorm")} == {"BatchNorm"}
    assert reported(model="DRAW", norm="RMSNorm") == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.update(colour="red"), "'colour'"),
        (lambda t: t.pop("place"), "'place'"),
        (lambda t: t.update(source="nobody"), "nobody"),
        (lambda t: t.update(model="my net"), "'my net'"),
        (lambda t: t["rows"][0].update(norm="layer"), "'layer'"),
        (lambda t: t["rows"][0]["values"].append(1.0), "2 values for 1 columns"),
        (lambda t: t["rows"][0].update(values=["a"]), "'a'"),
        (lambda t: t["rows"][0].update(values=[None]), "without"),
        (lambda t: t.update(training={"hours": 2}), r"training.*hours"),
        (lambda t: t.update(training={"epochs": 0}), r"training.*epochs"),
        (lambda t: t["columns"][0].update(training=5), r"training.* 5"),
        (lambda t: t["columns"][0].update(metric="loss"), "'loss'"),
        (lambda t: t["rows"].append(t["rows"][0]), "appears twice"),
    ],
)
def test_a_spoiled_table_is_refused(raw: Any, spoil: Any, message: str) -> None:
    parse(raw)
    spoil(raw["tables"][0])
    with pytest.raises(ValueError, match=message):
        parse(raw)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw["metrics"]["nll"].update(logged="bits"), "no factor from 'bits'"),
        (lambda raw: raw["citations"]["ba2016"].pop("arxiv"), "ba2016: neither arxiv nor venue"),
        (lambda raw: raw["cited"]["always"].append("ba2061"), "ba2061"),
        (lambda raw: raw["cited"]["norms"].update(BatchNorm=["me"]), "'me'"),
        (lambda raw: raw.pop("citations"), "'citations'"),
        (lambda raw: raw.update(tables=[[]]), "tables"),
    ],
)
def test_a_spoiled_file_is_refused(raw: Any, spoil: Any, message: str) -> None:
    spoil(raw)
    with pytest.raises(ValueError, match=message):
        parse(raw)


# Whom to cite


def cited_norms(raw: Any) -> set[str | None]:
    return {*raw["cited"]["norms"], *raw["cited"]["recurrent_norms"]}


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
    assert (laurent.short, laurent.link) == ("Laurent et al. 2017", "")
    assert str(laurent) == "Laurent, Ballas, Vincent (2017): Recurrent Normalization Propagation"
    assert "author = {Laurent, César and Ballas, Nicolas and Vincent, Pascal}" in laurent.bibtex
    assert "eprint" not in laurent.bibtex
    assert Citation("a", ("B, C",), 2000, "D", url="https://e").link == "https://e"


# Comparison


def draw(norm: str = "LayerNorm", value: float = 83.0, **size: Any) -> list[Any]:
    facts = {k: v for k, v in (FULL_DRAW | size).items() if v is not None}
    return comparison("DRAW", norm, {"test_bound": value}, data="binarized_mnist/test", size=facts)


def test_same_data_size_and_training_give_a_difference() -> None:
    (row,) = draw(epochs=200, lr=1e-3)
    assert (row.metric, row.measured, row.unit) == ("bound", 83.0, "nats/image")
    assert row.reported.value == 82.09
    assert row.difference == pytest.approx(0.91)
    assert row.reason == row.at == ""
    assert row.cells()[2].startswith(
        "82.09 nats/image (layer normalisation; Ba et al. 2016, section 6"
    )
    assert "BinarizedMNIST/test" in row.cells()[2]
    assert row.cells()[3] == "+0.91 nats/image"


def test_shorter_training_is_behind_or_ahead() -> None:
    assert [r.outcome for r in draw(epochs=15)] == ["0.91 nats/image behind at 15 of 200 epochs"]
    assert [r.outcome for r in draw(epochs=15, value=82.0)] == [
        "0.09 nats/image ahead at 15 of 200 epochs"
    ]
    assert [r.outcome for r in draw(epochs=15, value=82.09)] == ["equal at 15 of 200 epochs"]
    # More is better.
    (row,) = comparison(
        "SequenceClassifier", "BatchNorm", {"accuracy": 0.8818}, data="mnist/test",
        size=PIXELS | {"epochs": 10},
    )  # fmt: skip
    assert row.outcome == "7.22 points behind at 10 of 200 epochs"
    (row,) = draw(epochs=15, glimpses=32)
    assert row.outcome == "not comparable: glimpses 32 here, 64 there"
    (row,) = draw()
    assert row.outcome == "not comparable: epochs not stated here, 200 there"


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
        rows = comparison(
            "Handwriting", "Identity", {"sequence_nll": -1000.0}, data="iam_ondb/validation",
            size=LINES | changed,
        )  # fmt: skip
        return rows[0].outcome

    assert outcome() == "+96.9 nats/sequence"
    assert outcome(peephole=False) == "+96.9 nats/sequence (peephole False here, True there)"
    assert outcome(length_mode="crop").startswith("not comparable: length_mode crop here")


def test_only_numbers_for_the_same_data_and_split_count() -> None:
    for data in ("IAMOnDB/test", "IAMOnDB/train", "mine/validation"):
        (row,) = comparison(
            "Handwriting", "Identity", {"sequence_nll": -1.0}, data=data, size=LINES
        )
        assert row.cells() == ("sequence_nll", "-1 nats/sequence", "", "")


def test_obstacles_of_the_run_are_told() -> None:
    (row,) = comparison(
        "DRAW", "LayerNorm", {"bound": 83.0}, data="binarized_mnist/test",
        size=FULL_DRAW | {"epochs": 200}, obstacles=["a part of the test set here"],
    )  # fmt: skip
    assert row.outcome == "not comparable: a part of the test set here"


def test_fractions_stand_beside_percentages() -> None:
    size = {"hidden_size": 120}
    rows = comparison("AttentiveReader", "Identity", {"error": 0.461}, data="CNN/test", size=size)
    assert [(r.measured, r.unit) for r in rows] == [(pytest.approx(46.1), "%")]
    assert rows[0].difference == pytest.approx(1.1)
    assert rows[0].cells()[1::2] == ("46.1 %", "+1.1 points")


def test_every_comparable_number_gets_a_row() -> None:
    size = {
        "training_data": "coco",
        "embedding_features": 300,
        "hidden_size": 1024,
        "image_features": 4096,
        "measure": "order",
        "fold_size": 1000,
    }
    rows = comparison(
        "OrderEmbedding", "Identity", {"caption_r1": 40.0}, data="COCO/test-1k", size=size
    )
    assert [r.reported.value for r in rows if r.reported] == [46.7, 46.6]
    assert [r.difference for r in rows] == [pytest.approx(-6.7), pytest.approx(-6.6)]
    (symmetric,) = comparison(
        "OrderEmbedding",
        "Identity",
        {"caption_r1": 40.0},
        data="COCO/test-1k",
        size=size | {"measure": "cosine"},
    )
    assert symmetric.reported is not None
    assert symmetric.reported.value == 45.4
    # Two sources that nothing keeps from being compared: neither goes first.
    outcomes = [row.outcome for row in draw("Identity", epochs=200, batch_size=128)]
    assert outcomes == ["+0.64 nats/image", "-1.3 nats/image"]
    # Both have one obstacle.
    rows = draw("Identity", epochs=200, batch_size=128, latent_size=50)
    assert [row.reported.value for row in rows] == [82.36, 84.3]


def test_another_size_is_not_comparable() -> None:
    size = {"hidden_size": 64}
    (row,) = comparison("AttentiveReader", "Identity", {"error": 0.4}, data="CNN/test", size=size)
    assert row.difference is None
    assert row.reported is not None
    assert row.reported.value == 45.0
    assert row.reason == "not comparable: hidden_size 64 here, 120 there"
    (row,) = comparison("AttentiveReader", "Identity", {"error": 0.4}, data="CNN/test", size={})
    assert row.reason == "not comparable: hidden_size not stated here, 120 there"


def test_nothing_reported() -> None:
    (row,) = comparison("MLPClassifier", "my_norm.MyNorm", {"error": 0.02}, data="a/test", size={})
    assert row.reported is None
    assert row.cells() == ("error", "2 %", "", "")
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
    assert "82.09 [1]" in body
    assert "not comparable" in body
    assert body.count("nats/image") == 2
    # Sizes stand in square brackets, which rich would take for markup.
    notes = " ".join(below.split())
    assert "[1] layer normalisation; Ba et al. 2016, section 6.4; BinarizedMNIST/test; " in notes
    assert "not comparable: read_size [2, 2] here, 2 there" in notes
    assert "[2]" not in notes


def test_a_table_fits_into_a_narrow_terminal() -> None:
    """Where each number is from, and what differs, stands below; rows from one place share it."""
    size = {**LINES, "peephole": False}
    measured = {"sequence_nll": -1056.5, "point_nll": -1.7176, "sse": 0.49615}
    rows = comparison("Handwriting", "Identity", measured, data="IAMOnDB/validation", size=size)
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
    assert "measured" in text
    assert "reported" not in text
    assert "difference" not in text
    text = printed(rows, card={"bound": 90.12345, "kl": 3.0})
    assert " 90.123 " in text
    assert "card" in text
    assert "kl" not in text
