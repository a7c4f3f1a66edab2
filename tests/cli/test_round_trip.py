"""Models of words, from the first command to the last: fit, test, predict, card, publish, load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, results, succeed

import ln_zoo
from ln_zoo.data import SyntheticClozeQA, SyntheticScenes

SIZES = {"train_size": 24, "batch_size": 4, "val_size": 13, "test_size": 11, "eval_batch_size": 4}
SCENES = SIZES | {"image_features": 9}


def penalties(model: ln_zoo.models.OrderEmbedding) -> list[list[float]]:
    """E of each test scene with its own captions."""
    data = SyntheticScenes(**SCENES, vocabulary=list(model.vocabulary))
    data.setup()
    found = []
    for batch in data.test_dataloader():
        captions, images = model(batch)
        e = model.penalties(captions, images)
        found += [e[5 * i : 5 * i + 5, i].tolist() for i in range(len(images))]
    return found


def answers(model: ln_zoo.models.AttentiveReader) -> list[str]:
    """The word that is most probable after each test passage."""
    data = SyntheticClozeQA(**SIZES, vocabulary=list(model.vocabulary))
    data.setup()
    # In the order of the file: batches go by length.
    inputs, _ = data.evaluation_set("test", 11)[torch.arange(11)]
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
    here: Path, monkeypatch: pytest.MonkeyPatch, model: list[str], sizes: dict[str, int],
    data: str, callback: str, picture: str, key: str, expected: Callable[..., list],
) -> None:  # fmt: skip
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    given = [f"--data={data}", *(f"--data.{k}={v}" for k, v in sizes.items()), *QUIET]
    succeed("fit", f"--model={model[0]}", *model[1:], *given, "--trainer.max_epochs=1")
    (last,) = Path("runs").glob("*/version_0/checkpoints/last.ckpt")
    succeed("test", f"--ckpt_path={last}", *given, "--trainer.logger.save_dir=tested")
    (path,) = Path("tested").glob("*/version_0/test_results.json")
    succeed("card", last, f"--results={path}", "--out=cards/words.tiny")
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
