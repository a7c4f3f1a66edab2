"""Protocols of the sentence tasks against the released code's loops; their files and controls."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy import sparse, stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score

from ln_zoo.data.books.sentence_tasks import read_task
from ln_zoo.metrics import sentence_tasks
from ln_zoo.metrics.sentence_controls import EchoState, MeanOfWords, WordVectors, majority
from ln_zoo.metrics.sentence_scores import Score, as_text, markdown, read_csv, score_of
from ln_zoo.metrics.sentence_tasks import (
    accuracy,
    evaluate,
    pair_features,
    relatedness,
    soft_targets,
)

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 123)
VECTORS = RNG.normal(size=(123, 3)) + 1.5 * LABELS[:, None]
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


@pytest.fixture
def few_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to choose from, where how a penalty is chosen is not asked."""
    monkeypatch.setattr(sentence_tasks, "PENALTIES", (1, 16))


def score(train: list, test: list, c: float, solver: str = "liblinear") -> float:
    chosen = LogisticRegression(C=c, solver=solver).fit(VECTORS[train], LABELS[train])
    return float(np.mean(chosen.predict(VECTORS[test]) == LABELS[test]))


def without(folds: list, i: int) -> list:
    return [row for j, fold in enumerate(folds) if j != i for row in fold]


def shuffled_folds() -> list[tuple[list, list]]:
    order = np.arange(len(LABELS))
    np.random.RandomState(1234).shuffle(order)
    folds = [fold.tolist() for fold in np.array_split(order, 10)]
    return [(fold, without(folds, i)) for i, fold in enumerate(folds)]


def test_the_original_protocol_is_the_released_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence_tasks.PENALTIES == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    monkeypatch.setattr(sentence_tasks, "PENALTIES", (1.0, 256.0))
    found = []
    for test, rows in shuffled_folds():
        inner = [fold.tolist() for fold in np.array_split(rows, 10)]
        best_c, best = 0.0, -1.0
        for c in (1, 256):
            mean = np.mean([score(without(inner, j), inner[j], c) for j in range(10)])
            if mean > best + 1e-12:
                best_c, best = c, mean
        found.append(score(rows, test, best_c))
    assert accuracy(VECTORS, LABELS, "original") == pytest.approx(np.mean(found), abs=1e-12)


def test_the_fast_protocol_chooses_by_the_last_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    penalties = (0.01, 0.03, 0.1, 0.3, 1)
    monkeypatch.setattr(sentence_tasks, "PENALTIES", penalties)
    found = []
    for test, rows in shuffled_folds():
        inner = len(rows) - len(rows) // 10
        scores = [score(rows[:inner], rows[inner:], c, "lbfgs") for c in penalties]
        found.append(score(rows, test, penalties[int(np.argmax(scores))], "lbfgs"))
    fast = accuracy(VECTORS, LABELS, "fast")
    assert fast == pytest.approx(np.mean(found), abs=1e-12)
    assert accuracy(VECTORS, LABELS, "fast", seed=1) != fast


@pytest.mark.slow
def test_processes_give_the_same() -> None:
    for protocol in ("fast", "original"):
        alone = accuracy(VECTORS, LABELS, protocol)  # type: ignore[arg-type]
        assert accuracy(VECTORS, LABELS, protocol, n_jobs=2) == alone  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_penalties")
def test_sparse_vectors_give_the_same_and_constant_ones_the_majority() -> None:
    rows = sparse.csr_matrix(np.where(np.abs(VECTORS) > 0.4, VECTORS, 0))
    assert accuracy(rows, LABELS, "fast") == accuracy(rows.toarray(), LABELS, "fast")
    labels = np.repeat([1, 0], [70, 50])
    assert accuracy(np.zeros((120, 1)), labels, "fast") == pytest.approx(70 / 120)


@pytest.mark.parametrize(
    ("labels", "protocol", "message"),
    [
        (LABELS, "senteval", "protocol.*senteval"),
        (LABELS[:99], "fast", "labels.*100.*99 of 2"),
        (np.zeros(123), "fast", "labels.*100.*123 of 1"),
    ],
)
def test_wrong_arguments(labels: np.ndarray, protocol: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accuracy(VECTORS[: len(labels)], labels, protocol)  # type: ignore[arg-type]


def test_soft_targets_are_those_of_the_released_code() -> None:
    scores = np.array([1, 1.2, 2.5, 3, 4.9, 5])
    expected = np.zeros((6, 5))
    for row, score in enumerate(scores):
        for i in range(5):
            if i + 1 == np.floor(score) + 1:
                expected[row, i] = score - np.floor(score)
            if i + 1 == np.floor(score):
                expected[row, i] = np.floor(score) - score + 1
    np.testing.assert_allclose(soft_targets(scores), expected, atol=1e-12)


def drawn_pairs(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    features = rng.normal(size=(count, 4))
    scores = np.clip(3 + features @ [1.0, -0.5, 0.3, 0.0] + rng.normal(size=count), 1, 5)
    return features, scores


def test_relatedness_is_that_of_the_released_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Adam in float64, in rounds until one is no better."""
    monkeypatch.setattr(sentence_tasks, "_EPOCHS", 6)
    rng = np.random.default_rng(7)
    parts = [drawn_pairs(count, rng) for count in (300, 60, 200)]
    (train, y), (trial, trial_y), (test, test_y) = parts
    order = np.arange(300)
    np.random.RandomState(1234).shuffle(order)
    first = sentence_tasks._Regression(4, 1234).weights
    assert 0.5 < np.abs(first[:4]).max() < (6 / 9) ** 0.5
    weight = torch.tensor(first[:4].T, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=1e-3)

    def logits(features: np.ndarray) -> torch.Tensor:
        return torch.tensor(features) @ weight.T + bias

    def expected(features: np.ndarray) -> np.ndarray:
        return (logits(features).softmax(-1) @ torch.arange(1.0, 6).double()).detach().numpy()

    best, predicted, rounds = -1.0, np.zeros(200), 0
    while True:
        rounds += 1
        for _ in range(6):
            for rows in (order[:128], order[128:256], order[256:]):
                targets = torch.tensor(soft_targets(y[rows]))
                adam.zero_grad()
                torch.nn.functional.cross_entropy(logits(train[rows]), targets).backward()
                adam.step()
        r = stats.pearsonr(expected(trial), trial_y)[0]
        if r <= best:
            break
        best, predicted = r, expected(test)
    assert rounds > 3
    found = relatedness([part[0] for part in parts], [part[1] for part in parts])
    # As far as float32 goes over some hundred updates.
    assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, test_y)[0], abs=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, test_y)[0], abs=1e-3)
    assert found["mse"] == pytest.approx(np.mean((predicted - test_y) ** 2), abs=1e-4)


def test_predictions_that_do_not_vary_have_no_correlation() -> None:
    parts = [np.zeros((count, 2)) for count in (30, 10, 10)]
    scores = [np.linspace(1, 5, count) for count in (30, 10, 10)]
    found = relatedness(parts, scores)
    assert np.isnan(found["pearson"])
    assert np.isnan(found["spearman"])
    # Nothing is left to learn but the mean.
    assert found["mse"] == pytest.approx(np.var(scores[2]), abs=0.2)


def test_evaluate_encodes_both_sides_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_tasks, "_EPOCHS", 6)
    rng = np.random.default_rng(5)
    table = {f"s{i}": rng.normal(size=3) for i in range(60)}

    def part(begin: int) -> SimpleNamespace:
        first, second = ([f"s{i}" for i in range(b, b + 10)] for b in (begin, begin + 10))
        return SimpleNamespace(first=first, second=second, scores=np.linspace(1, 5, 10))

    task = SimpleNamespace(name="SICK", train=part(0), trial=part(20), test=part(40))
    found = evaluate(lambda sentences: np.stack([table[s] for s in sentences]), task)
    vectors = np.stack(list(table.values()))
    features = [
        np.column_stack([abs(a - b), a * b])
        for a, b in (
            (vectors[begin : begin + 10], vectors[begin + 10 : begin + 20]) for begin in (0, 20, 40)
        )
    ]
    expected = relatedness(features, [np.linspace(1, 5, 10)] * 3)
    assert found == {f"sick_{name}": value for name, value in expected.items()}
    assert pair_features(vectors[:2], vectors[2:4]).shape == (2, 6)


@pytest.mark.usefixtures("few_penalties")
def test_evaluate_gives_per_cent_and_refuses_bad_vectors() -> None:
    task = SimpleNamespace(name="MR", sentences=[str(i) for i in range(123)], labels=LABELS)
    found = evaluate(lambda sentences: VECTORS[[int(s) for s in sentences]], task, "fast")
    assert found == {"mr": 100 * accuracy(VECTORS, LABELS, "fast")}
    refuses(r"\(n, d\).*123.*\(122, 3\)", evaluate, lambda sentences: VECTORS[1:], task, "fast")
    refuses("not finite", evaluate, lambda sentences: VECTORS * np.nan, task, "fast")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CR", "MR", "SUBJ", "MPQA"])
def test_a_bag_of_words_scores_as_in_plain_cross_validation(name: str, data_root: Path) -> None:
    """By scikit-learn, with other folds and one penalty: within two standard errors."""
    root = data_root / "sentence_tasks"
    if not root.is_dir():
        pytest.skip(f"needs the sentence tasks: {root} does not exist")
    task = read_task(name, str(root), split_words=False)
    words = TfidfVectorizer(token_pattern=r"\S+").fit_transform(task.sentences)
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    plain = LogisticRegression(C=4, max_iter=300)
    share = cross_val_score(plain, words, task.labels, cv=folds).mean()
    error = (share * (1 - share) / len(task.labels)) ** 0.5
    found = evaluate(lambda sentences: words, task, "fast")[name.lower()] / 100
    assert found == pytest.approx(share, abs=2 * error)


SCORES = [
    score_of("mean", "mr", 77.3, items=10_662, protocol="fast", unknown=0.25, seconds=1.5),
    score_of("mean", "sick_pearson", 0.842, items=4927, protocol="fast", seconds=2.0),
    Score("other", "mr", math.nan, None, 10, None, "fast", 3.0),
]


def test_a_table_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(as_text(SCORES, ".csv", {}), encoding="utf-8")
    assert as_text(read_csv(path), ".csv", {}) == path.read_text(encoding="utf-8")
    path.write_text("encoder,metric\nmean,mr\n", encoding="utf-8")
    refuses(r"scores\.csv", read_csv, path)


def test_markdown_has_reported_rows_in_italics() -> None:
    reported = {"paper": {"mr": 79.5, "trec": 1.0}, "none": {"trec": 1.0}}
    lines = markdown(SCORES, reported).splitlines()
    # Pearson: (1 - r^2) / sqrt(n - 3).
    assert lines[2:] == [
        "| encoder | SICK r | MR |",
        "|---|---|---|",
        "| mean | 0.842 ± 0.004 | 77.3 ± 0.4 |",
        "| other |  | - |",
        "| *paper* |  | *79.5* |",
    ]


SENTENCES = ["it rained all day", "it", "the sun shone again and again"]


def test_random_word_vectors_depend_on_the_word_and_the_seed() -> None:
    one, other = WordVectors(features=5), WordVectors(features=5, seed=1)
    a = one.of("rain sun rain")
    assert a.shape == (3, 5)
    assert np.array_equal(a[0], a[2])
    assert not np.array_equal(a[0], a[1])
    assert np.array_equal(WordVectors(features=5).of("sun")[0], a[1])
    assert not np.array_equal(other.of("sun")[0], a[1])
    refuses(r"words and vectors .*1 and 2", WordVectors, ["a"], np.zeros((2, 3)))


def test_majority_and_mean() -> None:
    assert majority(SENTENCES).shape == (3, 1)
    vectors = WordVectors(features=6)
    found = MeanOfWords(vectors)(SENTENCES)
    for row, sentence in zip(found, SENTENCES, strict=True):
        mean = sum(vectors.of(word)[0].astype(float) for word in sentence.split())
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), rtol=1e-5)


def test_echo_states_are_those_of_the_equation() -> None:
    network = EchoState(WordVectors(features=7), features=20, radius=0.8, leak=0.7, seed=3)
    found = network(SENTENCES)
    for row, sentence in zip(found, SENTENCES, strict=True):
        words = network.vectors.of(sentence).astype(float)
        words /= np.linalg.norm(words, axis=1, keepdims=True)
        halves = []
        for way, order in enumerate((words, words[::-1])):
            h, states = np.zeros(10), []
            for a in order @ network._inputs[way] + network._biases[way]:
                h = 0.3 * h + 0.7 * np.tanh(a + h @ network._states[way])
                states.append(h)
            halves.append(np.max(states, axis=0))
        expected = np.concatenate(halves)
        np.testing.assert_allclose(row, expected / np.linalg.norm(expected), atol=1e-5)
    for matrix in network._states:
        assert np.abs(np.linalg.eigvals(matrix.toarray())).max() == pytest.approx(0.8, rel=1e-5)
    assert np.array_equal(EchoState(features=20)(SENTENCES), EchoState(features=20)(SENTENCES))
    refuses("features must be an even number", EchoState, features=3)


def test_a_large_reservoir_has_its_radius() -> None:
    matrix = EchoState(features=400, radius=0.9)._states[0].toarray()
    assert np.abs(np.linalg.eigvals(matrix)).max() == pytest.approx(0.9, rel=1e-3)
