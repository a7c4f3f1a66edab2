"""Pictures of what a reader attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from training import quiet_trainer

from ln_zoo.callbacks import AttentionPictures
from ln_zoo.data import SyntheticClozeQA
from ln_zoo.files import quantize_png
from ln_zoo.models import AttentiveReader
from ln_zoo.norms import LayerNorm
from ln_zoo.plots.attention import Attended, plot_attention
from ln_zoo.testing import CallbackCase

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


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "questions is empty"),
        ([QUESTION._replace(attention=[1.0])], "question 0 has 4 words and 1 "),
        ([QUESTION._replace(passage=[], attention=[])], "question 0 has 0 words"),
        ([QUESTION._replace(attention=[0.5, 0.5, float("nan"), 0])], "must be finite and at least"),
        ([QUESTION, QUESTION._replace(attention=[-1.0, 0, 0, 0])], "attention of question 1 must"),
    ],
)
def test_wrong_input(questions: list[Attended], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_attention(questions)


def test_prediction_draws_once(tmp_path: Path) -> None:
    data = SyntheticClozeQA(train_size=20, val_size=5, test_size=20)
    torch.manual_seed(0)
    model = AttentiveReader(data.vocabulary, 8, norm=LayerNorm())
    pictures = AttentionPictures(str(tmp_path / "mine"), questions=2)
    found = quiet_trainer(pictures, default_root_dir=tmp_path).predict(model, datamodule=data)
    assert pictures.written == [tmp_path / "mine" / "attention.png"]
    # The questions are the first and the middle one; what is drawn is what the model says.
    data.setup()
    inputs, _ = data.evaluation_set("test")[torch.tensor([0, 10])]
    model.eval()
    attention = model.attention(inputs).double()
    assert found is not None
    expected = [
        Attended(
            model.vocabulary.words(inputs.passage[i, :n].tolist()),
            attention[i, :n].tolist(),
            model.vocabulary.words(inputs.query[i, :q].tolist()),
            found[0]["answer"][10 * i],
            found[0]["prediction"][10 * i],
        )
        for i, (n, q) in enumerate(
            zip(inputs.passage_lengths.tolist(), inputs.query_lengths.tolist(), strict=True)
        )
    ]
    plot_attention(expected).savefig(tmp_path / "expected.png", dpi=150)
    quantize_png(tmp_path / "expected.png")
    one, two = (Image.open(path) for path in (pictures.written[0], tmp_path / "expected.png"))
    assert one.size == two.size
    assert np.array_equal(np.asarray(one.convert("RGB")), np.asarray(two.convert("RGB")))


class TestAttentionPictures(CallbackCase):
    stage = "predict"
    needs = True
    invalid: ClassVar[dict[str, Any]] = {"questions": (0, -1)}

    def callback(self, **arguments: Any) -> AttentionPictures:
        return AttentionPictures(**arguments)

    def model(self) -> AttentiveReader:
        return AttentiveReader(self.data().vocabulary, 4)

    def data(self) -> SyntheticClozeQA:
        return SyntheticClozeQA(train_size=20, val_size=5, test_size=5)
