"""Files of sentences: those of the tasks by official numbers and names, and one per line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_support import real_folder
from refusals import refuses

from ln_zoo.data import SentenceFile
from ln_zoo.data.books.sentence_tasks import TASKS, ClassificationTask, RelatednessTask, read_task

BAD_ROWS = (
    *("1\tA\tB\tx\tNEUTRAL\n", "1\tA\tB\t0.5\tNEUTRAL\n", "1\tA\t \t2\tNEUTRAL\n", "1\tA\n"),
    *("1\tA\tB\t2\tNEUTRAL\tmore\n", f"1\t{'a' * 200_000}\tB\t9\tNEUTRAL\n"),
)
HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"


@pytest.fixture(scope="module")
def official(data_root: Path) -> Path:
    return real_folder(data_root, "sentence_tasks")


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
    first = "The young boys are playing outdoors and the man is smiling nearby"
    assert task.trial.first[0] == first
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
    scores = [part.scores.tolist() for part in (task.train, task.trial, task.test)]
    assert scores == [[1.5], [2.5], [3.5]]
    assert task.map(str.lower).test.first == ['a "dog"']


@pytest.mark.parametrize(
    ("content", "mentioned"),
    [
        *((f"{HEADER}\n{row}", "line 3: .* 5 fields.*1 to 5.{,300}$") for row in BAD_ROWS),
        (HEADER, "holds no sentence"),
        ("", "sentence_A, sentence_B, relatedness_score"),
        (HEADER.replace("_B", "_C") + "1\tA\tB\t2\tNEUTRAL\tmore\n", "sentence_B.*sentence_C"),
    ],
)
def test_damaged_pairs(tmp_path: Path, content: str, mentioned: str) -> None:
    for name in ("train", "trial", "test_annotated"):
        (tmp_path / f"SICK_{name}.txt").write_text(content)
    refuses(rf"SICK_train\.txt.*{mentioned}", read_task, "SICK", str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*items here")
def test_sentences_of_pairs_may_be_long(tmp_path: Path) -> None:
    long = "word " * 40_000
    for name in ("train", "trial", "test_annotated"):
        (tmp_path / f"SICK_{name}.txt").write_text(f"{HEADER}1\t{long}\tB\t2\tNEUTRAL\n")
    task = read_task("SICK", str(tmp_path), split_words=False)
    assert task.sentences == [long.strip(), "B"] * 3


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    refuses(r"no folder of sentence tasks: .*--data", read_task, "CR", error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r"no folder .*nothing of sentence tasks"):
        read_task("CR", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"has no custrev.pos and custrev.neg, in a folder"):
        read_task("CR", str(tmp_path))
    refuses("task must be 'MR' or", read_task, "SST", str(tmp_path))
    (tmp_path / "custrev.pos").write_bytes(b"good\nbad \xff\n")
    (tmp_path / "custrev.neg").write_text("\n \n")
    refuses(r"custrev.pos must be text in UTF-8, but byte 9 is not", read_task, "CR", str(tmp_path))
    (tmp_path / "custrev.pos").write_text("good\n")
    refuses(r"custrev.neg holds no sentence", read_task, "CR", str(tmp_path))
    assert TASKS == ("MR", "CR", "SUBJ", "MPQA", "SICK")


# A text file with one sentence per line


def write(folder: Path, content: bytes) -> SentenceFile:
    path = folder / "sentences.txt"
    path.write_bytes(content)
    return SentenceFile(str(path), batch_size=2, eos=False)


def test_sentences_come_by_length(tmp_path: Path) -> None:
    data = write(tmp_path, "a b c\n d\n\u00e9t\u00e9 e\n".encode())
    data.setup("predict")
    assert data.sentences == ["a b c", "d", "\u00e9t\u00e9 e"]
    loader = data.predict_dataloader()
    assert list(loader) == [(["d", "\u00e9t\u00e9 e"], False), (["a b c"], False)]
    assert list(loader.sampler) == [1, 2, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: give a text file with one sentence per line"),
        (b"a\n\nb\n", "line 2 is empty: every line is a sentence"),
        (b"a\n\xff\n", "must be text in UTF-8, but byte 2 is not"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert "sentences.txt" in refuses(message, write(tmp_path, content).setup, "predict")


def test_wrong_arguments() -> None:
    refuses("no file nowhere", SentenceFile, "nowhere.txt", error=FileNotFoundError)
    refuses("batch_size must be an integer of at least 1", SentenceFile, __file__, batch_size=0)
