"""The files of the sentence tasks: official numbers, other names, damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ln_zoo.data.sentence_tasks import TASKS, ClassificationTask, RelatednessTask, read_task

HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"


@pytest.fixture(scope="module")
def official(data_root: Path) -> Path:
    folder = data_root / "sentence_tasks"
    if not folder.is_dir():
        pytest.skip(f"needs the sentence tasks: {folder} does not exist")
    return folder


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [("MR", 5331, 5331), ("CR", 2405, 1366), ("SUBJ", 5000, 5000), ("MPQA", 3311, 7292)],
)
def test_official_numbers(official: Path, name: str, positive: int, negative: int) -> None:
    task = read_task(name, str(official), split_words=False)
    assert isinstance(task, ClassificationTask)
    assert task.labels.tolist() == [1] * positive + [0] * negative
    assert len(task.sentences) == positive + negative
    assert all(sentence.split() for sentence in task.sentences)
    assert task.eos is False
    # Its README gives the mean length in tokens.
    mean = np.mean([len(sentence.split()) for sentence in task.sentences])
    assert mean == pytest.approx({"MR": 21.0, "CR": 20.1, "SUBJ": 24.1, "MPQA": 3.1}[name], abs=0.1)


@pytest.mark.filterwarnings("error")
def test_official_numbers_of_sick(official: Path) -> None:
    task = read_task("SICK", str(official), split_words=False)
    assert isinstance(task, RelatednessTask)
    parts = (task.train, task.trial, task.test)
    assert [len(part.scores) for part in parts] == [4500, 500, 4927]
    # As its README has them.
    for part, mean in zip(parts, (3.521, 3.594, 3.530), strict=True):
        assert part.scores.mean() == pytest.approx(mean, abs=5e-4)
    assert task.trial.first[0] == (
        "The young boys are playing outdoors and the man is smiling nearby"
    )
    assert task.eos is True
    assert len(task.sentences) == 2 * 9927


def test_objective_sentences_are_the_positive_class(official: Path) -> None:
    task = read_task("SUBJ", str(official), split_words=False)
    first = (official / "SUBJ" / "subj.objective").read_text().split("\n")[0]
    assert task.sentences[0] == " ".join(first.split())


def test_names_and_encoding_of_the_released_code(tmp_path: Path) -> None:
    (tmp_path / "plot.tok.gt9.5000").write_bytes("a caf\xe9 , it's\x85 so\n\n".encode("latin-1"))
    (tmp_path / "quote.tok.gt9.5000").write_text("i like it \r\nreally\n")
    with pytest.warns(UserWarning, match=r"SUBJ has 1 \+ 2 items here and 5,000 \+ 5,000 offic"):
        task = read_task("SUBJ", str(tmp_path), split_words=False)
    assert task.sentences == ["a caf\xe9 , it's so", "i like it", "really"]
    assert task.labels.tolist() == [1, 0, 0]


@pytest.mark.filterwarnings("ignore:.*items here")
def test_words_are_divided_as_in_the_released_code(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    (tmp_path / "custrev.pos").write_text("it's a \" great \" player . i don't mind .\n")
    (tmp_path / "custrev.neg").write_text("no\n")
    task = read_task("CR", str(tmp_path))
    assert task.sentences[0] == "it 's a `` great `` player . i do n't mind ."
    assert task.map(str.upper).sentences[1] == "NO"


@pytest.mark.filterwarnings("ignore:.*items here")
def test_pairs(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "trial", "test_annotated")):
        rows = f'1\tA "dog"\tB\t{number + 1.5}\tNEUTRAL\n'
        (tmp_path / f"SICK_{name}.txt").write_text(HEADER + rows)
    task = read_task("SICK", str(tmp_path), split_words=False)
    assert task.sentences == ['A "dog"', "B"] * 3
    assert [part.scores.tolist() for part in (task.train, task.trial, task.test)] == [
        [1.5],
        [2.5],
        [3.5],
    ]
    assert task.map(str.lower).test.first == ['a "dog"']


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1\tA\tB\tx\tNEUTRAL\n", r"line 2: expected two sentences and a score from 1 to 5"),
        ("1\tA\tB\t0.5\tNEUTRAL\n", r"line 2: expected two sentences and a score from 1 to 5"),
        ("1\tA\t \t2\tNEUTRAL\n", r"line 2: expected two sentences and a score from 1 to 5"),
        ("1\tA\n", r"line 2: expected two sentences and a score from 1 to 5"),
        ("", r"SICK_train.txt must be a table .* has no row"),
    ],
)
def test_damaged_pairs(tmp_path: Path, row: str, message: str) -> None:
    for name in ("train", "trial", "test_annotated"):
        (tmp_path / f"SICK_{name}.txt").write_text(HEADER + row)
    with pytest.raises(ValueError, match=message):
        read_task("SICK", str(tmp_path))


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no folder of sentence tasks: .*--data"):
        read_task("CR")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nothing of sentence tasks"):
        read_task("CR", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"has no custrev.pos and custrev.neg, in a folder"):
        read_task("CR", str(tmp_path))
    with pytest.raises(ValueError, match="task must be 'MR' or"):
        read_task("SST", str(tmp_path))
    (tmp_path / "custrev.pos").write_bytes(b"good\nbad \xff\n")
    (tmp_path / "custrev.neg").write_text("\n \n")
    with pytest.raises(ValueError, match=r"custrev.pos must be text in UTF-8, but byte 9 is not"):
        read_task("CR", str(tmp_path))
    (tmp_path / "custrev.pos").write_text("good\n")
    with pytest.raises(ValueError, match=r"custrev.neg holds no sentence"):
        read_task("CR", str(tmp_path))
    assert TASKS == ("MR", "CR", "SUBJ", "MPQA", "SICK")
