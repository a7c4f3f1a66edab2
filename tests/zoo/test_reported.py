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
from ln_zoo.zoo.reported import (
    MODELS,
    NORMS,
    Reported,
    citations,
    comparison,
    metric_unit,
    parse,
    render,
    reported,
)

MLP = {"in_features": 784, "hidden_features": [1000, 1000], "num_classes": 10}


@pytest.fixture
def raw() -> Any:
    text = files("ln_zoo.zoo").joinpath("reported.yaml").read_text(encoding="utf-8")
    return copy.deepcopy(yaml.safe_load(text))


def one(**wanted: Any) -> Reported:
    (found,) = [
        r for r in reported() if all(getattr(r, key) == value for key, value in wanted.items())
    ]
    return found


def values(method: str, *metrics: str, **wanted: Any) -> list[float | None]:
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
        assert values(method, *columns, place="Table 2, section 6.1") == row
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
    assert one(model="DRAW", norm="Identity").value == 82.36
    layer_norm = one(model="DRAW", norm="LayerNorm")
    assert (layer_norm.value, layer_norm.unit) == (82.09, "nats/image")
    assert layer_norm.size["glimpses"] == 64
    assert values("synthesis network", "sequence_nll", "sse") == [-1096.9, 0.23]
    noisy = values("synthesis network, adaptive weight noise", "sequence_nll")
    assert noisy == [-1128.2]
    entries = reported(model="Handwriting", metric="sequence_nll")
    prediction = [r.value for r in entries if r.method.startswith("prediction network")]
    assert prediction == [-1025.7, -1041.0, -1057.7]
    assert [r.value for r in reported(model="Handwriting", norm="LayerNorm")] == [None, None]


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
        by_order = {r.size["permuted"]: r.value for r in rows if r.method == method}
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
    assert [r.value for r in top4] == [None, 50.3, 49.5, 50.0, 47.1, 43.9]
    full = [(r.split, r.value) for r in reported(model="AttentiveReader") if r.dataset == "CNN"]
    assert full == [
        ("validation", 38.4),
        ("test", 37.0),
        ("validation", 45.5),
        ("test", 45.0),
        ("validation", 37.9),
        ("test", 36.3),
    ]


def test_figure_6_and_the_convnets_print_no_values() -> None:
    figure = reported(model="MLPClassifier")
    assert {(r.norm, r.metric, r.size["batch_size"]) for r in figure} == {
        (norm, metric, batch_size)
        for norm in ("LayerNorm", "BatchNorm", "Identity")
        for metric in ("nll", "error")
        for batch_size in (128, 4)
    }
    assert all(r.value is None and "printed nowhere" in r.note for r in figure)
    section = [r for r in reported(model="ConvClassifier") if r.source == "ba2016"]
    assert [(r.norm, r.value) for r in section] == [
        ("Identity", None),
        ("LayerNorm", None),
        ("BatchNorm", None),
    ]


# Schema


def test_every_entry_is_complete_and_named_as_the_library_names_it(raw: Any) -> None:
    assert set(NORMS) <= set(ln_zoo.norms.__all__)
    assert {r.model for r in reported()} - {None} == set(MODELS)
    for r in reported():
        assert r.method
        assert r.place
        assert r.dataset
        assert r.split
        assert citations()[r.source].arxiv
        unit = metric_unit(r.metric)
        assert unit is not None
        assert (unit.unit, unit.higher_is_better) == (r.unit, r.higher_is_better)
        if r.unit == "%" and r.value is not None:
            assert 0 < r.value < 100
    assert {r.source for r in reported()} == set(citations())
    # Ours, which no source reports.
    measured_alone = {"importance_bound", "kl", "point_nll"}
    assert {r.metric for r in reported()} | measured_alone == set(raw["metrics"])


def test_lookup_filters() -> None:
    assert reported(model="DRAW") == [r for r in reported() if r.model == "DRAW"]
    assert {r.norm for r in reported(norm="BatchNorm")} == {"BatchNorm"}
    assert reported(model="DRAW", norm="WeightNorm") == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.update(colour="red"), r"unknown keys \['colour'\]"),
        (lambda t: t.pop("place"), r"\['place'\] missing"),
        (lambda t: t.update(source="nobody"), "source is none of"),
        (lambda t: t.update(model="Transformer"), "model 'Transformer' is none of"),
        (lambda t: t["rows"][0].update(norm="layer"), "norm 'layer' is none of"),
        (lambda t: t["rows"][0]["values"].append(1.0), "3 values for 2 columns"),
        (lambda t: t["rows"][0].update(values=["a", 1]), "'a' is no number"),
        (lambda t: t["columns"][0].update(metric="loss"), "metric 'loss' is not among"),
        (lambda t: t["rows"].append(t["rows"][0]), "stands there twice"),
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
        (lambda raw: raw["citations"]["ba2016"].pop("arxiv"), r"ba2016: \['arxiv'\] missing"),
        (lambda raw: raw.pop("citations"), r"\['citations'\] missing"),
        (lambda raw: raw.update(tables=[[]]), "expected a mapping"),
    ],
)
def test_a_spoiled_file_is_refused(raw: Any, spoil: Any, message: str) -> None:
    spoil(raw)
    with pytest.raises(ValueError, match=message):
        parse(raw)


# Comparison


def test_same_data_and_size_give_a_difference() -> None:
    size = {
        "glimpses": 64,
        "hidden_features": 256,
        "latent_features": 100,
        "read_size": 2,
        "write_size": 5,
        "lr": 1e-3,
        "epochs": 200,
    }
    (row,) = comparison(
        "DRAW", "LayerNorm", {"test_bound": 83.0}, data="binarized_mnist/test", size=size
    )
    assert (row.metric, row.measured, row.unit) == ("bound", 83.0, "nats/image")
    assert row.reported is not None
    assert row.reported.value == 82.09
    assert row.difference == pytest.approx(0.91)
    assert row.reason == ""
    assert row.cells()[3] == "+0.91 nats/image"
    assert "1607.06450, section 6.4" in row.cells()[2]
    assert "BinarizedMNIST/test" in row.cells()[2]
    early = size | {"epochs": 15}
    (row,) = comparison(
        "DRAW", "LayerNorm", {"test_bound": 83.0}, data="binarized_mnist/test", size=early
    )
    assert row.difference is None
    assert row.reason == "not comparable: epochs 15 here, 200 there"


def test_fractions_stand_beside_percentages() -> None:
    size = {"hidden_features": 120}
    rows = comparison("AttentiveReader", "Identity", {"error": 0.461}, data="CNN/test", size=size)
    assert [(r.measured, r.unit) for r in rows] == [(pytest.approx(46.1), "%")]
    assert rows[0].difference == pytest.approx(1.1)
    assert rows[0].cells()[1] == "46.1 %"


def test_every_comparable_number_gets_a_row() -> None:
    size = {
        "training_data": "coco",
        "embedding_features": 300,
        "hidden_features": 1024,
        "image_features": 4096,
    }
    rows = comparison(
        "OrderEmbedding", "Identity", {"caption_r1": 40.0}, data="COCO/test-1k", size=size
    )
    assert [r.reported.value for r in rows if r.reported] == [46.7, 46.6]
    assert [r.difference for r in rows] == [pytest.approx(-6.7), pytest.approx(-6.6)]


def test_other_data_or_size_is_not_comparable() -> None:
    size = {"hidden_features": 64}
    (row,) = comparison("AttentiveReader", "Identity", {"error": 0.4}, data="mine/test", size=size)
    assert row.difference is None
    assert row.reason.startswith("not comparable: mine/test here, CNN")
    (row,) = comparison("AttentiveReader", "Identity", {"error": 0.4}, data="CNN/test", size=size)
    assert row.difference is None
    assert row.reported is not None
    assert row.reported.value == 45.0
    assert row.reason == "not comparable: hidden_features 64 here, 120 there"
    (row,) = comparison("AttentiveReader", "Identity", {"error": 0.4}, data="CNN/test", size={})
    assert row.reason == "not comparable: hidden_features not stated here, 120 there"


def test_figure_6_gets_a_dash_with_the_reason() -> None:
    (row,) = comparison(
        "MLPClassifier",
        "BatchNorm",
        {"test_error": 0.0163},
        data="mnist/test",
        size={**MLP, "hidden_features": (1000, 1000), "batch_size": 128},
    )
    assert row.difference is None
    assert row.reason == (
        "no value printed (Figure 6 shows curves over 60 epochs; end values are printed nowhere)"
    )
    assert row.cells()[1] == "1.63 %"
    assert row.cells()[2].startswith("— (BatchNorm, on the logits too; 1607.06450, Figure 6 (left)")
    (small,) = comparison(
        "MLPClassifier",
        "BatchNorm",
        {"test_error": 0.02},
        data="mnist/test",
        size={**MLP, "batch_size": 4},
    )
    assert small.reported is not None
    assert small.reported.place == "Figure 6 (right), section 6.6"


def test_nothing_reported() -> None:
    (row,) = comparison("MLPClassifier", "my_norm.MyNorm", {"error": 0.02}, data="a/test", size={})
    assert row.reported is None
    assert row.reason == "no source reports MLPClassifier with my_norm.MyNorm"
    (row,) = comparison("DRAW", "LayerNorm", {"kl": 20.0}, data="a/test", size={})
    assert row.reason == "no source reports kl of DRAW with LayerNorm"
    assert row.cells() == ("kl", "20 nats/image", "—", row.reason)
    (row,) = comparison("DRAW", "LayerNorm", {"clamped": 0.5}, data="a/test", size={})
    assert row.cells() == ("clamped", "0.5", "—", row.reason)


def test_table() -> None:
    rows = comparison(
        "MLPClassifier", "LayerNorm", {"error": 0.02}, data="mnist/test", size={"in_features": 64}
    )
    console = Console(file=io.StringIO(), width=600)
    console.print(render(rows, title="on digits"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "on digits" in text
    for word in ("metric", "measured", "reported", "difference", "2 %", "not comparable"):
        assert word in text
    # Sizes stand in square brackets, which rich would take for markup.
    assert "hidden_features not stated here, [1000, 1000] there" in text
