"""Vectors of words from elsewhere, in a model's vocabulary (Kiros et al. 2015, section 2.2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ln_zoo.models import SkipThought

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture
def model() -> SkipThought:
    return SkipThought(WORDS, hidden_size=8, embedding_features=6)


def write(path: Path, vectors: dict[str, np.ndarray], header: bool = False) -> Path:
    lines = [f"{len(vectors)} {len(next(iter(vectors.values())))}"] if header else []
    lines += [" ".join([word, *(f"{x:.9g}" for x in vector)]) for word, vector in vectors.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("header", [True, False], ids=["word2vec", "GloVe"])
def test_words_beyond_the_vocabulary_are_mapped(
    model: SkipThought, tmp_path: Path, header: bool
) -> None:
    """Where vectors are an affine map of the model's own, least squares find the inverse."""
    random = np.random.default_rng(0)
    away, shift = random.normal(size=(6, 6)), random.normal(size=6)
    own = model.embedding.weight.detach().double().numpy()
    given = {word: own[i + 2] @ away + shift for i, word in enumerate(WORDS)}
    meant = {"neu": random.normal(size=6) / 10, "été": random.normal(size=6) / 10}
    given |= {word: vector @ away + shift for word, vector in meant.items()}
    given |= {"a_phrase": shift, "w3": given["w3"]}
    path = write(tmp_path / "vectors.txt", given, header)
    before = model.encode(["w1 neu été", "w3 w4"])
    assert model.expand_vocabulary(path) == 2
    assert model.expansion is not None
    for word, vector in meant.items():
        found = model.expansion.vectors[model.expansion.rows[word]].numpy()
        assert np.allclose(found, vector, atol=1e-4)

    # The encoder reads them like words of its own.
    other = SkipThought([*WORDS, *meant], hidden_size=8, embedding_features=6)
    state = model.state_dict()
    for name, value in other.state_dict().items():
        value[: len(state[name])] = state[name]
    rows = [model.expansion.rows[word] for word in meant]
    other.state_dict()["embedding.weight"][22:] = model.expansion.vectors[rows]
    after = model.encode(["w1 neu été", "w3 w4"])
    assert np.allclose(after, other.encode(["w1 neu été", "w3 w4"]), atol=1e-6)
    assert not np.allclose(after[0], before[0], atol=1e-3)
    assert np.array_equal(after[1], before[1])


def test_too_few_common_words_are_told(model: SkipThought, tmp_path: Path) -> None:
    vectors = {word: np.ones(4) * i for i, word in enumerate(["w1", "w2", "neu"])}
    with pytest.warns(UserWarning, match=r"2 .* 5 "):
        model.expand_vocabulary(write(tmp_path / "few.txt", vectors))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"w1 1 2\nneu 1\n", "line 2: expected a word in UTF-8 and 2 numbers"),
        (b"w1 1 2\n\xe9t\xe9 1 2\n", "line 2: expected a word in UTF-8"),
        (b"neu 1 2\n", "has no word that the model knows"),
    ],
)
def test_wrong_files_are_refused(
    model: SkipThought, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        model.expand_vocabulary(path)
    assert str(path) in str(caught.value)
    assert model.expansion is None
