"""Files of cloze questions: the CNN distribution's ``.question`` files, and JSON lines."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ln_zoo.files import read_regular

#: The token of the query that stands for the answer.
PLACEHOLDER = "@placeholder"
#: What the distribution calls our sets.
FOLDERS = {"train": "training", "val": "validation", "test": "test"}

_BLOCKS = ("URL", "passage", "question", "answer", "entities")
_ENTITY = re.compile(r"@entity\d+")
_MOST_BYTES = 10_000_000


class Question(NamedTuple):
    """A passage, a query with one entity blanked, and that entity.

    Attributes:
        name: says which question it is, in errors and predictions.
        passage: tokens; entities are ``@entity0``, ``@entity1``, ...
        query: tokens, ``@placeholder`` among them.
        answer: one of the passage's entities.
    """

    name: str
    passage: list[str]
    query: list[str]
    answer: str


def is_entity(token: str) -> bool:
    """Whether a token stands for an entity.

    Example:
        >>> is_entity("@entity12"), is_entity("@placeholder")
        (True, False)
    """
    return _ENTITY.fullmatch(token) is not None


def parse_question(text: str, where: str) -> Question:
    r"""A question out of the text of a ``.question`` file (Hermann et al. 2015).

    Five blocks with an empty line between them: URL, passage, question, answer, and the entities,
    a line ``@entityN:name`` each. Names are checked and left out: a model must not see them.

    Args:
        text: of the file.
        where: what errors call it.

    Raises:
        ValueError: for another number of blocks, an entity without a name, and as `checked`.

    Example:
        >>> blocks = ["url", "@entity1 sings .", "@placeholder sings", "@entity1", "@entity1:A: B"]
        >>> parse_question("\n\n".join(blocks), "a.question")
        Question(name='a.question', passage=['@entity1', 'sings', '.'],
                 query=['@placeholder', 'sings'], answer='@entity1')
    """
    # Passages of a corpus are one line each, so an empty line always ends a block.
    parts = re.split(r"\r?\n[ \t]*\r?\n", text.strip()) if text.strip() else []
    blocks = [part.strip() for part in parts]
    if len(blocks) != len(_BLOCKS):
        raise ValueError(
            f"{where} has {len(blocks)} blocks, expected {len(_BLOCKS)} with an empty line between "
            f"them: {', '.join(_BLOCKS)}"
        )
    _, passage, query, answer, entities = blocks
    for line in entities.splitlines():
        entity, colon, _ = line.partition(":")  # a name may have colons of its own
        if not colon or not is_entity(entity.strip()):
            raise ValueError(f"{where}: expected a line @entityN:name, got {line[:60]!r}")
    return checked(Question(where, passage.split(), query.split(), answer), where)


def checked(question: Question, where: str) -> Question:
    """The question itself, if it can be answered.

    Raises:
        ValueError: for an empty passage, a query without placeholder, an answer that is not an
            entity or is not in the passage.
    """
    if not question.passage:
        raise ValueError(f"{where}: the passage is empty")
    if PLACEHOLDER not in question.query:
        raise ValueError(f"{where}: the query has no {PLACEHOLDER}: nothing is asked")
    if not is_entity(question.answer):
        raise ValueError(f"{where}: the answer must be one @entityN, got {question.answer[:60]!r}")
    if question.answer not in question.passage:
        raise ValueError(f"{where}: the answer {question.answer} is not in the passage")
    return question


# Folders and archives of .question files


def find_question_folders(root: Path) -> dict[str, Path] | None:
    """The folders of the three sets, in a folder or in ``questions``, ``cnn/questions`` in it.

    Raises:
        FileNotFoundError: if some are there and others are not.
    """
    for inner in ("", "questions", "cnn/questions"):
        folders = {name: root / inner / folder for name, folder in FOLDERS.items()}
        missing = [path for path in folders.values() if not path.is_dir()]
        if not missing:
            return folders
        if len(missing) < len(folders):
            raise FileNotFoundError(
                f"{root / inner} lacks {', '.join(path.name for path in missing)}: a corpus has "
                f"the folders {', '.join(FOLDERS.values())}"
            )
    return None


def read_question_folder(folder: Path) -> Iterator[Question]:
    """The questions of a folder of ``.question`` files, in the order of their names.

    Raises:
        ValueError: for a folder without such files, or a file that cannot be read as one.
    """
    paths = sorted(folder.glob("*.question"))
    if not paths:
        raise ValueError(f"{folder} has no .question files")
    for path in paths:
        try:
            content = read_regular(path, _MOST_BYTES)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        yield parse_question(_text(content, str(path)), path.name)


def read_question_archive(path: Path) -> dict[str, list[Question]]:
    """The questions of a tar archive of the distribution, compressed or not, by set.

    Members are read where they lie; nothing is unpacked. What is not ``training/*.question``,
    ``validation/*.question`` or ``test/*.question``, in any folder, is passed over.

    Raises:
        ValueError: for a damaged archive, one that lacks a set, or a file that cannot be read.
    """
    sets: dict[str, list[Question]] = {name: [] for name in FOLDERS}
    of_folder = {folder: name for name, folder in FOLDERS.items()}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = Path(member.name).parts
                name = of_folder.get(parts[-2]) if len(parts) > 1 else None
                if name is None or not member.isfile() or not member.name.endswith(".question"):
                    continue
                where = f"{path}: {member.name}"
                if member.size > _MOST_BYTES:
                    raise ValueError(f"{where} is longer than {_MOST_BYTES:,} bytes")
                file = archive.extractfile(member)
                assert file is not None  # of a regular member there is one
                question = parse_question(_text(file.read(), where), where)
                sets[name].append(question._replace(name=parts[-1]))
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} is damaged or not a tar archive ({error}): copy it again"
        ) from error
    for name, questions in sets.items():
        if not questions:
            raise ValueError(f"{path} has no {FOLDERS[name]}/*.question")
        questions.sort()
    return sets


# JSON lines


_OPEN: dict[str, Callable[..., IO[str]]] = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}


def find_json_lines(folder: Path, corpus: str) -> dict[str, Path] | None:
    """``{corpus}_train.jsonl``, ``_valid`` and ``_test``, compressed (.xz, .gz) or not.

    Raises:
        FileNotFoundError: if some are there and others are not.
    """
    found: dict[str, Path] = {}
    for name, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        for ending in ("", ".xz", ".gz"):
            path = folder / f"{corpus}_{part}.jsonl{ending}"
            if path.is_file():
                found.setdefault(name, path)
    if not found:
        return None
    missing = {"train", "val", "test"} - set(found)
    if missing:
        raise FileNotFoundError(
            f"{folder} has {', '.join(path.name for path in found.values())} and lacks the file of "
            f"{', '.join(sorted(missing))}: a corpus has {corpus}_train, _valid and _test"
        )
    return found


def read_json_lines(path: Path) -> Iterator[Question]:
    """The questions of a file of JSON lines: ``id``, ``passage``, ``query``, ``answer``.

    Other keys are left alone, ``entities`` among them: a model must not see the names.

    Raises:
        ValueError: for a damaged file, or a line that is not such a question.
    """
    count = 0
    try:
        with _OPEN[path.suffix](path, "rt", encoding="utf-8") as file:
            for count, line in enumerate(file, 1):
                yield _of_json(line, f"{path}, line {count}")
    except (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is truncated or damaged after line {count} ({error}): copy it again"
        ) from error
    if not count:
        raise ValueError(f"{path} is empty")


def _of_json(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    keys = ("id", "passage", "query", "answer")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        raise ValueError(f"{where} must be an object with the texts {', '.join(keys)}")
    name, passage, query, answer = (row[key] for key in keys)
    return checked(Question(name, passage.split(), query.split(), answer), where)


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be UTF-8, but byte {error.start} is not") from None
