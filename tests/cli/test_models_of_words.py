"""Models of words, from the first command to the last, and text in, vectors out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import QUIET, Patch, last, load, results, succeed
from data_support import in_order, ready

import ln_zoo
from ln_zoo.data import SyntheticClozeQA, SyntheticScenes
from ln_zoo.models import CombinedSkipThoughts, SkipThought

# Fit, test, predict, card, publish, load

SIZES = {"train_size": 24, "batch_size": 4, "val_size": 13, "test_size": 11, "eval_batch_size": 4}
SCENES = SIZES | {"image_features": 9}


def penalties(model: ln_zoo.models.OrderEmbedding) -> list[list[float]]:
    """E of each test scene with its own captions."""
    data = ready(SyntheticScenes(**SCENES, vocabulary=list(model.vocabulary)))
    found = []
    for batch in data.test_dataloader():
        captions, images = model(batch)
        e = model.penalties(captions, images)
        found += [e[5 * i : 5 * i + 5, i].tolist() for i in range(len(images))]
    return found


def answers(model: ln_zoo.models.AttentiveReader) -> list[str]:
    """The word that is most probable after each test passage."""
    # In the order of the file: batches go by length.
    inputs, _ = in_order(
        ready(SyntheticClozeQA(**SIZES, vocabulary=list(model.vocabulary))), "test"
    )
    return model.vocabulary.words(model(inputs).argmax(-1).tolist())


@pytest.mark.parametrize(
    ("model", "sizes", "data", "callback", "picture", "key", "expected"),
    [
        (
            ["OrderEmbedding", "--model.embedding_features=6", "--model.hidden_size=8"],
            SCENES, "SyntheticScenes", "RetrievalPictures", "retrieval.png", "penalty", penalties,
        ),
        (
            ["AttentiveReader", "--model.hidden_size=6"],
            SIZES, "SyntheticClozeQA", "AttentionPictures", "attention.png", "prediction", answers,
        ),
    ],
    ids=["order_embedding", "attentive_reader"],
)  # fmt: skip
def test_from_fit_to_load(
    here: Path, monkeypatch: Patch, model: list[str], sizes: dict[str, int],
    data: str, callback: str, picture: str, key: str, expected: Callable[..., list],
) -> None:  # fmt: skip
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    given = [f"--data={data}", *(f"--data.{k}={v}" for k, v in sizes.items()), *QUIET]
    succeed("fit", f"--model={model[0]}", *model[1:], *given, "--trainer.max_epochs=1")
    (last,) = Path("runs").glob("*/version_0/checkpoints/last.ckpt")
    succeed("test", f"--ckpt_path={last}", *given, "--trainer.logger.save_dir=tested")
    (path,) = Path("tested").glob("*/version_0/test_results.json")
    Path("facts.yaml").write_text("license: mit\n")
    succeed("card", last, f"--results={path}", "--facts=facts.yaml", "--out=cards/words.tiny")
    dry = succeed("publish", "words.tiny", "--repo_id=someone/words", "--dry_run")
    assert "someone/words" in dry.out

    # By its name: the numbers of the card, and predictions that are the loaded model's own.
    succeed("test", "--weights=words.tiny", *given, "--trainer.logger.save_dir=again")
    assert results(Path("again"))["metrics"] == results(Path("tested"))["metrics"]
    done = succeed(
        "predict", "--weights=words.tiny", *given, f"--trainer.callbacks={callback}",
        "--trainer.callbacks+=PredictionWriter", "--trainer.callbacks.path=found.jsonl",
        "--trainer.logger.save_dir=drawn",
    )  # fmt: skip
    (drawn,) = Path("drawn").glob("*/version_0/*.png")
    assert drawn.name == picture
    assert f"{drawn.parent}: {picture}" in done.out
    assert drawn.read_bytes().startswith(b"\x89PNG")
    found = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    values = [line[key] for line in sorted(found, key=lambda line: line["index"])]
    with torch.no_grad():
        own = expected(ln_zoo.load("words.tiny"))
    if key == "penalty":
        torch.testing.assert_close(torch.tensor(values), torch.tensor(own))
    else:
        assert values == own


# ``ln-zoo predict`` with a model of sentences

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
