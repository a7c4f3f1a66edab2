"""What captions and images find, as pictures: the right answers, in their order, framed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from training import quiet_trainer

from ln_zoo.callbacks import RetrievalPictures
from ln_zoo.data import Digits, SyntheticScenes
from ln_zoo.models import OrderEmbedding
from ln_zoo.plots.retrieval import _RIGHT, Found, plot_retrieval
from ln_zoo.testing import CallbackCase

SIZES: dict[str, Any] = {"train_size": 8, "val_size": 4, "test_size": 9}


def predict(callback: RetrievalPictures, model: LightningModule, data: Any) -> None:
    quiet_trainer(callback).predict(model, datamodule=data)


def test_answers_are_the_nearest(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SyntheticScenes(**SIZES, eval_batch_size=4)
    torch.manual_seed(0)
    model = OrderEmbedding(data.vocabulary, 256, 8, 12)
    drawn: dict[str, list[Found]] = {}

    def keep(images: list[Found], captions: list[Found], *rest: Any) -> Any:
        drawn.update(images=images, captions=captions)
        return plot_retrieval(images, captions, *rest)

    monkeypatch.setattr("ln_zoo.callbacks.retrieval_pictures.plot_retrieval", keep)
    state = torch.get_rng_state()
    callback = RetrievalPictures("out", queries=3, answers=4)
    predict(callback, model, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert callback.written == [Path("out/retrieval.png")]
    with Image.open(callback.written[0]) as image:
        assert (image.format, image.mode) == ("PNG", "P")
    whole = data.evaluation_set("test")[torch.arange(9)]
    e = model.eval().penalties(*model(whole)).tolist()
    read = data.captioned("test")
    words = [" ".join(caption) for caption in read.captions]
    for kind, names in (("images", read.names), ("captions", words)):
        assert len(drawn[kind]) == 3
        for found in drawn[kind]:
            if kind == "images":
                rows = [row for row, text in enumerate(words) if text == found.query]
                options = [(e[row], {row // 5}) for row in rows]
            else:
                column = read.names.index(found.query)
                options = [([row[column] for row in e], set(range(5 * column, 5 * column + 5)))]
            expected = []
            for penalties, right in options:
                order = sorted(range(len(penalties)), key=penalties.__getitem__)
                rank = 1 + min(place for place, i in enumerate(order) if i in right)
                answers = [names[i] for i in order[:4]]
                expected.append((answers, [i in right for i in order[:4]], rank))
            assert (list(found.answers), list(found.right), found.rank) in expected


def test_right_answers_are_framed_and_queries_printed() -> None:
    shown = {"a.jpg": np.zeros((4, 4, 3), np.uint8)}
    images = [Found("a dog", ["b.jpg", "a.jpg"], [False, True], 2)]
    captions = [Found("a.jpg", ["a dog", "a cat", "a man"], [True, False, False], 1)]
    figure = plot_retrieval(images, captions, shown.get, "title")
    axes = figure.axes
    frames = [axis.spines["left"].get_edgecolor() for axis in axes]
    green = tuple(int(_RIGHT[i : i + 2], 16) / 255 for i in (1, 3, 5))
    assert [frame[:3] == pytest.approx(green) for frame in frames] == [
        False, False, True, False, False,
    ]  # fmt: skip
    printed = [[text.get_text() for text in axis.texts] for axis in axes]
    assert printed == [
        ["a dog\n(rank 2)"],
        ["b.jpg"],
        [],
        [],
        ["a dog", "a cat", "a man", "(rank 1)"],
    ]
    assert [text.get_color() for text in axes[4].texts][:2] == [_RIGHT, "black"]
    assert len(axes[2].images) == len(axes[3].images) == 1


def test_wrong_input_is_told(in_tmp: Path) -> None:
    data = SyntheticScenes(**SIZES)
    with pytest.raises(ValueError, match=r"RetrievalPictures .*captioned and thumbnail.*Digits"):
        predict(RetrievalPictures(), OrderEmbedding(data.vocabulary, 256, 4, 5), Digits())
    with pytest.raises(ValueError, match="images and captions"):
        plot_retrieval([], [], {}.get)


class TestRetrievalPictures(CallbackCase):
    stage = "predict"
    needs = True
    invalid: ClassVar[dict[str, Any]] = dict.fromkeys(("queries", "answers"), (0, -1))

    def callback(self, **arguments: Any) -> RetrievalPictures:
        return RetrievalPictures(**arguments)

    def model(self) -> OrderEmbedding:
        return OrderEmbedding(self.data().vocabulary, 256, 4, 5)

    def data(self) -> SyntheticScenes:
        return SyntheticScenes(**SIZES)
