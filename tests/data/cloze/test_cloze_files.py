"""Files of cloze questions: ``.question`` files in folders and archives, JSON lines."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from data_support import SETS, in_order, ready
from refusals import refuses

from ln_zoo.data import ClozeQA
from ln_zoo.data.cloze.files import (
    Question,
    find_json_lines,
    find_question_folders,
    parse_question,
    read_json_lines,
    read_question_archive,
    read_question_folder,
)

URL = "http://web.archive.org/web/x"
PASSAGE, QUERY = "@entity1 met @entity0 in café .", "who met @entity0 ? @placeholder"
QUESTION = Question("q", PASSAGE.split(), QUERY.split(), "@entity1")
BLOCKS = [URL, PASSAGE, QUERY, "@entity1", "@entity1:Ada Lovelace\n@entity0:Babbage: the man"]


def text(**changed: str) -> str:
    names = ("url", "passage", "query", "answer", "entities")
    return "\n\n".join(changed.get(name, block) for name, block in zip(names, BLOCKS, strict=True))


@pytest.mark.parametrize(
    "content",
    [text(), text() + "\n", text() + "\n\n", text().replace("\n", "\r\n"), "\n" + text()],
    ids=["no final newline", "newline", "empty line", "carriage returns", "empty first line"],
)
def test_a_question(content: str) -> None:
    assert parse_question(content, "q") == QUESTION


@pytest.mark.parametrize("query", ["@placeholder sings", "it was @placeholder", "@placeholder"])
def test_the_placeholder_may_stand_anywhere(query: str) -> None:
    assert parse_question(text(query=query), "q").query == query.split()


def test_names_are_cut_at_the_first_colon_and_left_out() -> None:
    entities = "@entity12:Mission: Impossible: 2\n@entity0:\n@entity1: :"
    question = parse_question(text(entities=entities), "q")
    assert question == QUESTION
    assert "Mission" not in str(question)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "q has 0 blocks, expected 5"),
        (
            "\n\n".join(BLOCKS[:4]),
            "q has 4 blocks, expected 5 with an empty line between them: "
            "URL, passage, question, answer, entities",
        ),
        ("\n\n".join([*BLOCKS, "more"]), "q has 6 blocks, expected 5"),
        (text(passage=""), "q: the passage is empty"),
        (text(query="nothing is asked"), "q: the query has no @placeholder"),
        (text(answer="@entity7"), "q: the answer @entity7 is not in the passage"),
        (text(answer="Ada"), "q: the answer must be one @entityN, got 'Ada'"),
        (text(answer="@entity1 @entity0"), "q: the answer must be one @entityN"),
        (text(answer="@placeholder"), "q: the answer must be one @entityN"),
        (text(answer="@entity" + "9" * 5000), "q: .{,200}$"),  # more digits than an int may have
        (text(entities="Ada Lovelace"), "q: expected a line @entityN:name, got 'Ada Lovelace'"),
        (text(entities="Ada: Lovelace"), "q: expected a line @entityN:name"),
        (text(entities="@entity1"), "q: expected a line @entityN:name, got '@entity1'"),
    ],
)
def test_bad_questions(content: str, message: str) -> None:
    refuses(message, parse_question, content, "q")


def write_corpus(root: Path) -> Path:
    """Two questions to train on, one each to validate and test."""
    for folder, names in (("training", "ba"), ("validation", "c"), ("test", "d")):
        (root / folder).mkdir(parents=True)
        for name in names:
            content = text(passage=f"@entity1 {name} @entity0")
            (root / folder / f"{name}.question").write_text(content, encoding="utf-8")
    (root / "training" / "notes.txt").write_text("passed over")
    return root


def summary(sets: dict[str, list[Question]]) -> dict[str, list[tuple[str, str]]]:
    return {name: [(q.name, q.passage[1]) for q in found] for name, found in sets.items()}


EXPECTED = {
    "train": [("a.question", "a"), ("b.question", "b")],
    "val": [("c.question", "c")],
    "test": [("d.question", "d")],
}


@pytest.mark.parametrize("inner", ["", "questions", "cnn/questions"])
def test_folders(tmp_path: Path, inner: str) -> None:
    write_corpus(tmp_path / inner)
    folders = find_question_folders(tmp_path)
    found = {name: list(read_question_folder(folder)) for name, folder in folders.items()}
    assert summary(found) == EXPECTED


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert find_question_folders(tmp_path) == {}
    (tmp_path / "questions" / "training").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"lacks validation, test.*a corpus has"):
        find_question_folders(tmp_path)
    with pytest.raises(ValueError, match=r"training has no \.question files"):
        list(read_question_folder(tmp_path / "questions" / "training"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path) / "training"
    (folder / "a.question").write_bytes(b"\xff" + text().encode())
    refuses(r"a\.question.*byte 0", list, read_question_folder(folder))
    (folder / "a.question").unlink()
    os.mkfifo(folder / "a.question")  # nobody writes to it: reading would never end
    refuses(r"a\.question", list, read_question_folder(folder))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_archives(tmp_path: Path, mode: Any) -> None:
    """A link beside the questions is skipped; one in place of a question is an error."""
    write_corpus(tmp_path / "cnn" / "questions")
    for linked in ("README", "questions/test/e.question"):
        with tarfile.open(tmp_path / f"{Path(linked).stem}.tar", mode) as archive:
            archive.add(tmp_path / "cnn", "cnn")
            link = tarfile.TarInfo(f"cnn/{linked}")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    assert summary(read_question_archive(tmp_path / "README.tar")) == EXPECTED
    refuses(r"e\.tar.*e\.question.*link", read_question_archive, tmp_path / "e.tar")
    assert sorted(tmp_path.rglob("*")) == before


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    path, corpus = tmp_path / "cnn.tgz", write_corpus(tmp_path / "cnn")

    def pack(folder: Path, name: str) -> None:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, name)

    pack(corpus, "cnn")
    for content in (path.read_bytes()[:-100], b"no archive"):
        path.write_bytes(content)
        refuses(r"cnn\.tgz", read_question_archive, path)
    pack(corpus / "training", "training")
    refuses("validation", read_question_archive, path)
    (corpus / "test" / "d.question").write_text(text(answer="@entity9"))
    pack(corpus, "cnn")
    refuses(r"cnn/test/d\.question.*@entity9", read_question_archive, path)


def row(**changed: Any) -> dict[str, Any]:
    return {
        "id": "q", "source": "here", "passage": " ".join(QUESTION.passage),
        "query": " ".join(QUESTION.query), "answer": "@entity1", "entities": {"@entity1": "Ada"},
    } | changed  # fmt: skip


@pytest.mark.parametrize("ending", ["", ".xz", ".gz"])
def test_json_lines(tmp_path: Path, ending: str) -> None:
    opened: Any = {"": open, ".xz": lzma.open, ".gz": gzip.open}[ending]
    for part in ("train", "valid", "test"):
        with opened(tmp_path / f"mine_{part}.jsonl{ending}", "wt", encoding="utf-8") as file:
            file.write(json.dumps(row(), ensure_ascii=False) + "\n" + json.dumps(row(id="r")))
    paths = find_json_lines(tmp_path, "mine")
    assert list(paths) == ["train", "val", "test"]
    assert list(read_json_lines(paths["val"])) == [QUESTION, QUESTION._replace(name="r")]
    assert find_json_lines(tmp_path, "yours") == {}
    (tmp_path / f"mine_test.jsonl{ending}").unlink()
    refuses(r"mine.*test", find_json_lines, tmp_path, "mine", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("lines", "mentioned"),
    [
        ("", ""),
        ('{"id": ', "line 1"),
        ("[1]", "line 1.*id, passage, query, answer"),
        ("[" * 100_000, "line 1"),
        ('{"id": ' + "1" * 5000 + "}", "line 1"),
        (json.dumps(row(passage=3)), "line 1.*passage"),
        (json.dumps(row(passage=" ")), "line 1.*passage"),
        (json.dumps(row()) + "\n" + json.dumps(row(query="a")), "line 2.*@placeholder"),
        (json.dumps(row(answer="@entity2")), "line 1.*@entity2"),
        (json.dumps(row(answer="@entity" + "9" * 5000)), "line 1.{,200}$"),
        ("x" * 10_000_000, "10,000,000 bytes"),
    ],
    ids=range(11),
)
def test_bad_json_lines(tmp_path: Path, lines: str, mentioned: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(lines)
    refuses(rf"x\.jsonl.*{mentioned}", list, read_json_lines(path))


def test_damaged_json_lines(tmp_path: Path) -> None:
    line = json.dumps(row()).encode() + b"\n"
    for name, content, mentioned in (
        ("x.jsonl.xz", lzma.compress(line * 50)[:-20], ""),
        ("x.jsonl", line + b"\xff\n", ".*byte"),
    ):
        (tmp_path / name).write_bytes(content)
        refuses(f"{name}{mentioned}", list, read_json_lines(tmp_path / name))


def test_question_files_and_json_lines_give_the_same(tmp_path: Path) -> None:
    write_corpus(tmp_path / "cnn" / "questions")
    plain = {"root": str(tmp_path), "sentences": None, "entities": "file", "min_count": 1}
    files = ready(ClozeQA("cnn", **plain))
    for part, folder in (("train", "training"), ("valid", "validation"), ("test", "test")):
        rows = []
        for path in sorted((tmp_path / "cnn" / "questions" / folder).glob("*.question")):
            _, passage, query, answer, _ = path.read_text().split("\n\n")
            rows.append({"id": path.name, "passage": passage, "query": query, "answer": answer})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"mine_{part}.jsonl").write_text(lines)
    lines_of = ready(ClozeQA("mine", **plain))
    assert files.vocabulary == lines_of.vocabulary
    for name in SETS:
        (inputs, answers), (same_inputs, same_answers) = map(
            in_order, (files, lines_of), (name, name)
        )
        assert all(map(torch.equal, (*inputs, answers), (*same_inputs, same_answers)))
    assert files.name == "cnn"
    assert ClozeQA("cnn", str(tmp_path)).name == "cnn_top4"
    assert files.metadata["train_size"] == 2
