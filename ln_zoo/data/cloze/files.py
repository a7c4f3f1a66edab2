"""File formats of cloze questions: ``.question`` files of the CNN distribution, and JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ln_zoo.data.archives import open_file, read_archive, read_file, read_rest
from ln_zoo.data.folders import find_files
from ln_zoo.data.text_files import decode, read_lines

#: The token of the query that stands for the answer.
PLACEHOLDER = "@placeholder"
#: Folders of the sets in the distribution.
FOLDERS = {"train": "training", "val": "validation", "test": "test"}

_BLOCKS = ("URL", "passage", "question", "answer", "entities")
#: Numbers of up to 18 digits; Python converts no text of more than 4,300.
_ENTITY = re.compile(r"@entity\d{1,18}")
_MAX_BYTES = 10_000_000


class Question(NamedTuple):
    """A named passage, a query with ``@placeholder`` for one entity, and that ``@entityN``."""

    name: str
    passage: list[str]
    query: list[str]
    answer: str


def is_entity(token: str) -> bool:
    """Whether a token is ``@entityN``."""
    return _ENTITY.fullmatch(token) is not None


def parse_question(text: str, where: str) -> Question:
    """Parse a ``.question`` file (Hermann et al. 2015); errors name it ``where``.

    Five blocks separated by empty lines: URL, passage, question, answer, and entities, a line
    ``@entityN:name`` each. Names are validated and dropped: a model must not see them.
    """
    parts = re.split(r"\r?\n[ \t]*\r?\n", text.strip()) if text.strip() else []
    blocks = [part.strip() for part in parts]
    if len(blocks) != len(_BLOCKS):
        raise ValueError(
            f"{where} has {len(blocks)} blocks, expected {len(_BLOCKS)} with an empty line between "
            f"them: {', '.join(_BLOCKS)}"
        )
    _, passage, query, answer, entities = blocks
    for line in entities.splitlines():
        entity, colon, _ = line.partition(":")  # a name may have colons
        if not colon or not is_entity(entity.strip()):
            raise ValueError(f"{where}: expected a line @entityN:name, got {line[:60]!r}")
    return checked(Question(where, passage.split(), query.split(), answer), where)


def checked(question: Question, where: str) -> Question:
    """Return the question if it can be answered, else raise ValueError."""
    if not question.passage:
        raise ValueError(f"{where}: the passage is empty")
    if PLACEHOLDER not in question.query:
        raise ValueError(f"{where}: the query has no {PLACEHOLDER}")
    if not is_entity(question.answer):
        raise ValueError(f"{where}: the answer must be one @entityN, got {question.answer[:60]!r}")
    if question.answer not in question.passage:
        raise ValueError(f"{where}: the answer {question.answer} is not in the passage")
    return question


# Folders and archives of .question files


def find_question_folders(root: Path) -> dict[str, Path]:
    """Folders of the sets in ``root``, ``root/questions`` or ``root/cnn/questions``, or {}."""
    names = {name: (folder,) for name, folder in FOLDERS.items()}
    hint = f"a corpus has the folders {', '.join(FOLDERS.values())}"
    inner = (root, root / "questions", root / "cnn/questions")
    return next(filter(None, (find_files(folder, names, hint) for folder in inner)), {})


def read_question_folder(folder: Path) -> Iterator[Question]:
    """Iterate over the questions of a folder of ``.question`` files, sorted by name."""
    paths = sorted(folder.glob("*.question"))
    if not paths:
        raise ValueError(f"{folder} has no .question files")
    for path in paths:
        text = decode(read_file(path, _MAX_BYTES), path)
        yield parse_question(text, str(path))._replace(name=path.name)


def read_question_archive(path: Path) -> dict[str, list[Question]]:
    """Read the questions of an archive of the distribution, by set; other members are skipped."""
    sets: dict[str, list[Question]] = {name: [] for name in FOLDERS}
    names = {folder: name for name, folder in FOLDERS.items()}
    for member, content in read_archive(path):
        *_, folder, file = ("", "", *Path(member).parts)
        if folder in names and file.endswith(".question"):
            where = f"{path}: {member}"
            text = decode(read_rest(content, _MAX_BYTES, where), where)
            sets[names[folder]].append(parse_question(text, where)._replace(name=file))
    for name, questions in sets.items():
        if not questions:
            raise ValueError(f"{path} has no {FOLDERS[name]}/*.question")
        questions.sort()
    return sets


# JSON lines


def find_json_lines(folder: Path, corpus: str) -> dict[str, Path]:
    """``{corpus}_train.jsonl``, ``_valid`` and ``_test``, or compressed (.xz, .gz), or {}."""
    names = {
        name: [f"{corpus}_{part}.jsonl{ending}" for ending in ("", ".xz", ".gz")]
        for name, part in (("train", "train"), ("val", "valid"), ("test", "test"))
    }
    return find_files(folder, names, "a corpus has all three, plain or compressed (.xz, .gz)")


def read_json_lines(path: Path) -> Iterator[Question]:
    """Iterate over a file of JSON lines with ``id``, ``passage``, ``query`` and ``answer``."""
    count = 0
    with open_file(path) as file:
        for count, line in enumerate(read_lines(file, path), 1):
            yield _parse_json(line, f"{path}, line {count}")
    if not count:
        raise ValueError(f"{path} is empty")


def _parse_json(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    keys = ("id", "passage", "query", "answer")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        raise ValueError(f"{where} must be an object with the strings {', '.join(keys)}")
    name, passage, query, answer = (row[key] for key in keys)
    return checked(Question(name, passage.split(), query.split(), answer), where)
