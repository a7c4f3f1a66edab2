"""Pictures of predictions: what a reader attends to, what captions and images find."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from refusals import refuses
from training import quiet_trainer

from ln_zoo.callbacks import AttentionPictures, RetrievalPictures
from ln_zoo.data import Digits, SyntheticClozeQA, SyntheticScenes
from ln_zoo.models import AttentiveReader, OrderEmbedding
from ln_zoo.norms import LayerNorm
from ln_zoo.plots.attention import Attended, plot_attention
from ln_zoo.plots.retrieval import _RIGHT, Found, plot_retrieval
from ln_zoo.testing import CallbackCase
from ln_zoo.utils.files import quantize_png

# Attention

QUESTION = Attended(
    passage=["@entity0", "met", "@entity1", "."],
    attention=[0.5, 0.0, 0.25, 0.25],
    query=["@placeholder", "met", "@entity1"],
    answer="@entity0",
    prediction="@entity1",
)


def drawn(figure: Figure) -> tuple[dict[str, list[Any]], list[Rectangle]]:
    """The words with what they look like, and the boxes behind them."""
    (axis,) = figure.axes
    words: dict[str, list[Any]] = {}
    for text in axis.texts:
        words.setdefault(text.get_text(), []).append((text.get_color(), text.get_position()))
    return words, [patch for patch in axis.patches if isinstance(patch, Rectangle)]


def test_words_are_the_darker_the_more_attention_they_have() -> None:
    words, boxes = drawn(plot_attention([QUESTION], title="a reader"))
    assert [box.get_alpha() for box in boxes] == [1.0, 0.5, 0.5]
    # Behind the words they belong to.
    for box, word in zip(boxes, ("@entity0", "@entity1", "."), strict=True):
        _, (x, y) = words[word][-1]
        assert box.get_x() < x < box.get_x() + box.get_width()
        assert box.get_y() < y < box.get_y() + box.get_height()
    assert "a reader" in words


def test_answer_and_prediction_have_their_colours() -> None:
    words, _ = drawn(plot_attention([QUESTION]))
    green, red = "#00703c", "#c00000"
    # In the passage and behind the query, where the answer comes first.
    assert [colour for colour, _ in words["@entity0"]] == [green, green]
    assert [colour for colour, _ in words["@entity1"]] == ["black", red, red]
    words, _ = drawn(plot_attention([QUESTION._replace(prediction="@entity0")]))
    assert [colour for colour, _ in words["@entity0"]] == [green, green, green]
    assert {colour for colour, _ in words["@entity1"]} == {"black"}


def test_long_passages_go_on_in_the_next_line() -> None:
    many = QUESTION._replace(passage=["word"] * 300, attention=[1 / 300] * 300)
    figure = plot_attention([many, QUESTION])
    words, _ = drawn(figure)
    assert len(words["word"]) == 300
    rows = sorted({y for _, (_, y) in words["word"]})
    assert len(rows) == 14  # 22 words of four letters to a line of 110
    assert np.allclose(np.diff(rows), rows[1] - rows[0])
    width, height = figure.get_size_inches()
    for places in words.values():
        assert all(0 < x < width and 0 < y < height for _, (x, y) in places)
    plot_attention([QUESTION._replace(passage=["x" * 200], attention=[1.0])])


def test_prediction_draws_once(tmp_path: Path) -> None:
    data = SyntheticClozeQA(train_size=20, val_size=5, test_size=20)
    torch.manual_seed(0)
    model = AttentiveReader(data.vocabulary, 8, norm=LayerNorm())
    pictures = AttentionPictures(str(tmp_path / "mine"), questions=2)
    found = quiet_trainer(pictures, default_root_dir=tmp_path).predict(model, datamodule=data)
    assert pictures.written == [tmp_path / "mine" / "attention.png"]
    # The first and the middle question are drawn, with the model's weights.
    data.setup()
    inputs, _ = data.evaluation_set("test")[torch.tensor([0, 10])]
    model.eval()
    attention, words = model.attention(inputs).double(), model.vocabulary.words
    assert found is not None
    expected = []
    for i, (n, q) in enumerate(zip(inputs.passage_lengths, inputs.query_lengths, strict=True)):
        passage, query = words(inputs.passage[i, :n].tolist()), words(inputs.query[i, :q].tolist())
        answers = (found[0][name][10 * i] for name in ("answer", "prediction"))
        expected.append(Attended(passage, attention[i, :n].tolist(), query, *answers))
    plot_attention(expected).savefig(tmp_path / "expected.png", dpi=150)
    quantize_png(tmp_path / "expected.png")
    one, two = (Image.open(path) for path in (pictures.written[0], tmp_path / "expected.png"))
    assert one.size == two.size
    assert np.array_equal(np.asarray(one.convert("RGB")), np.asarray(two.convert("RGB")))


class TestAttentionPictures(CallbackCase):
    stage = "predict"
    needs = True
    invalid: ClassVar[dict[str, Any]] = {"questions": (0, -1)}
    callback = AttentionPictures
    data = staticmethod(partial(SyntheticClozeQA, train_size=20, val_size=5, test_size=5))

    def model(self) -> AttentiveReader:
        return AttentiveReader(self.data().vocabulary, 4)


# Retrieval

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
    framed = [place for place, frame in enumerate(frames) if frame[:3] == pytest.approx(green)]
    assert (len(frames), framed) == (5, [2])
    printed = [[text.get_text() for text in axis.texts] for axis in axes]
    answers = ["a dog", "a cat", "a man", "(rank 1)"]
    assert printed == [["a dog\n(rank 2)"], ["b.jpg"], [], [], answers]
    assert [text.get_color() for text in axes[4].texts][:2] == [_RIGHT, "black"]
    assert len(axes[2].images) == len(axes[3].images) == 1


def test_wrong_input_is_told(in_tmp: Path) -> None:
    data = SyntheticScenes(**SIZES)
    model = OrderEmbedding(data.vocabulary, 256, 4, 5)
    message = r"RetrievalPictures .*captioned and thumbnail.*Digits"
    refuses(message, predict, RetrievalPictures(), model, Digits())
    refuses("Number of rows", plot_retrieval, [], [], {}.get)


class TestRetrievalPictures(CallbackCase):
    stage = "predict"
    needs = True
    invalid: ClassVar[dict[str, Any]] = dict.fromkeys(("queries", "answers"), (0, -1))
    callback = RetrievalPictures
    data = staticmethod(partial(SyntheticScenes, **SIZES))

    def model(self) -> OrderEmbedding:
        return OrderEmbedding(self.data().vocabulary, 256, 4, 5)
