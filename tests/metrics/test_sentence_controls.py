"""Encoders that learn nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ln_zoo.metrics.sentence_controls import EchoState, MeanOfWords, WordVectors, majority

SENTENCES = ["it rained all day", "it", "the sun shone again and again"]


def test_random_word_vectors_depend_on_the_word_and_the_seed() -> None:
    one, other = WordVectors(features=5), WordVectors(features=5, seed=1)
    a = one.of("rain sun rain")
    assert a.shape == (3, 5)
    assert np.array_equal(a[0], a[2])
    assert not np.array_equal(a[0], a[1])
    assert np.array_equal(WordVectors(features=5).of("sun")[0], a[1])
    assert not np.array_equal(other.of("sun")[0], a[1])
    with pytest.raises(ValueError, match=r"words and vectors .*1 and 2"):
        WordVectors(["a"], np.zeros((2, 3)))


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
            for word in order:
                new = np.tanh(
                    word @ network._inputs[way] + h @ network._states[way] + network._biases[way]
                )
                h = 0.3 * h + 0.7 * new
                states.append(h)
            halves.append(np.max(states, axis=0))
        expected = np.concatenate(halves)
        np.testing.assert_allclose(row, expected / np.linalg.norm(expected), atol=1e-5)
    for matrix in network._states:
        assert np.abs(np.linalg.eigvals(matrix.toarray())).max() == pytest.approx(0.8, rel=1e-5)
    assert np.array_equal(EchoState(features=20)(SENTENCES), EchoState(features=20)(SENTENCES))
    with pytest.raises(ValueError, match="features must be an even number"):
        EchoState(features=3)


def test_a_large_reservoir_has_its_radius() -> None:
    matrix = EchoState(features=400, radius=0.9)._states[0].toarray()
    assert np.abs(np.linalg.eigvals(matrix)).max() == pytest.approx(0.9, rel=1e-3)
