"""``ln-zoo predict`` with a model of sentences: text in, vectors out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_support import QUIET, last, load, succeed

from ln_zoo.models import CombinedSkipThoughts, SkipThought

TEXTS = ["anna mended the boat", "they sold the cheese in the market", "john", "xylophones zigzag"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SkipThought, SkipThought]]:
    """Two models, of a current folder with their checkpoints and a text."""
    folder = tmp_path_factory.mktemp("sentences")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("\n".join(TEXTS) + "\n")
        models = []
        for name, encoder in (("one", "uni"), ("two", "bi")):
            succeed("fit", "--model=SkipThought", "--model.hidden_size=8", *QUIET,
                    "--model.embedding_features=4", f"--model.encoder={encoder}",
                    "--data=SyntheticBooks", "--data.books=5", "--data.paragraphs=3",
                    "--data.batch_size=4", "--trainer.max_steps=2",
                    f"--trainer.logger.name={name}")  # fmt: skip
            models.append(SkipThought.load_from_checkpoint(last(name=name)))
        yield models[0], models[1]


def predict(*argv: str, name: str = "one", option: str = "--weights") -> np.ndarray:
    done = succeed("predict", option, last(name=name), "--data=SentenceFile",
                   "--data.path=text.txt", "--data.batch_size=2", *QUIET, *argv)  # fmt: skip
    (line,) = [text for text in done.out.splitlines() if text.startswith("predictions: ")]
    found: np.ndarray = np.load(line.removeprefix("predictions: "))
    return found


def test_a_vector_for_each_line(trained: tuple[SkipThought, SkipThought]) -> None:
    one, two = trained
    words = load(last(name="one"))["hyper_parameters"]["vocabulary"]
    assert list(one.vocabulary) == words
    assert np.allclose(predict(), one.encode(TEXTS), atol=1e-6)
    assert np.allclose(predict("--data.eos=false"), one.encode(TEXTS, eos=False), atol=1e-6)

    writer = ["--trainer.callbacks=PredictionWriter", "--trainer.callbacks.path=first.npy"]
    predict(*writer)
    writer = ["--trainer.callbacks=PredictionWriter", "--trainer.callbacks.path=both.npy",
              "--trainer.callbacks.beside=first.npy"]  # fmt: skip
    both = CombinedSkipThoughts(one, two).encode(TEXTS)
    assert np.allclose(predict(*writer, name="two"), both, atol=1e-6)


def test_words_from_elsewhere(trained: tuple[SkipThought, SkipThought]) -> None:
    one, _ = trained
    lines = [f"{w} {i} {i % 3}" for i, w in enumerate([*list(one.vocabulary)[:9], "xylophones"])]
    Path("vectors.txt").write_text("\n".join(lines))
    expand = ["--trainer.callbacks=VocabularyExpansion", "--trainer.callbacks.path=vectors.txt"]
    found, plain = predict(*expand), predict()
    # Lightning restores a checkpoint's weights late: the map must be to those.
    assert np.array_equal(predict(*expand, option="--ckpt_path"), found)
    one.expand_vocabulary("vectors.txt")
    try:
        assert np.allclose(found, one.encode(TEXTS), atol=1e-6)
    finally:
        one.expansion = None
    assert np.allclose(found[:3], plain[:3], atol=1e-6)
    assert not np.allclose(found[3], plain[3], atol=1e-4)
