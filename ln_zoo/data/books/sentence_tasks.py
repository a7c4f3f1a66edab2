"""Tasks that evaluate sentence vectors: MR, CR, SUBJ, MPQA and SICK."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from ln_zoo.data.archives import read_file
from ln_zoo.data.books import english_tokens
from ln_zoo.data.folders import local_folder
from ln_zoo.data.text_files import decode
from ln_zoo.utils.checks import check_choice

_FOLDER = "sentence_tasks"
#: Files of the positive and negative class, as in SentEval and as in the released code.
_FILES = {
    "MR": [("rt-polarity.pos", "rt-polarity.neg")],
    "CR": [("custrev.pos", "custrev.neg")],
    "SUBJ": [("subj.objective", "subj.subjective"), ("plot.tok.gt9.5000", "quote.tok.gt9.5000")],
    "MPQA": [("mpqa.pos", "mpqa.neg")],
}
_MAX_BYTES = 100_000_000
_SHOWN = 200  # characters of a damaged line in an error
_SICK = ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt")
_COLUMNS = ("sentence_A", "sentence_B", "relatedness_score")
TASKS = (*_FILES, "SICK")
"""The tasks of the paper's Table 3."""
#: Tasks that their authors distribute in Latin-1.
_LATIN_1 = ("MR", "SUBJ")
#: Items without blank lines; papers count CR's and MPQA's too: 3,775 and 10,606.
_OFFICIAL = {
    "MR": (5331, 5331),
    "CR": (2405, 1366),
    "SUBJ": (5000, 5000),
    "MPQA": (3311, 7292),
    "SICK": (4500, 500, 4927),
}


@dataclass(frozen=True)
class ClassificationTask:
    """N sentences, words separated by blanks, with labels, int64 (N,).

    The positive class (positive opinions, objective sentences) comes first. ``eos``: whether the
    released code appends the end of a sentence in this task.
    """

    name: str
    sentences: list[str]
    labels: np.ndarray
    eos: bool = False

    def map(self, change: Callable[[str], str]) -> ClassificationTask:
        return replace(self, sentences=[*map(change, self.sentences)])


@dataclass(frozen=True)
class SentencePairs:
    """N pairs of sentences, words separated by blanks, with scores from 1 to 5, float64 (N,)."""

    first: list[str]
    second: list[str]
    scores: np.ndarray


@dataclass(frozen=True)
class RelatednessTask:
    """Pairs of sentences in a fixed split; ``trial`` is for early stopping, ``eos`` as above."""

    name: str
    train: SentencePairs
    trial: SentencePairs
    test: SentencePairs
    eos: bool = True

    @property
    def sentences(self) -> list[str]:
        return [s for part in self._parts for side in (part.first, part.second) for s in side]

    def map(self, change: Callable[[str], str]) -> RelatednessTask:
        train, trial, test = (
            replace(part, first=[*map(change, part.first)], second=[*map(change, part.second)])
            for part in self._parts
        )
        return replace(self, train=train, trial=trial, test=test)

    @property
    def _parts(self) -> tuple[SentencePairs, SentencePairs, SentencePairs]:
        return self.train, self.trial, self.test


def read_task(
    name: str, root: str | None = None, split_words: bool = True
) -> ClassificationTask | RelatednessTask:
    """Read a task from its files; warns if the number of items is not the official one.

    They are in ``root`` (default: ``sentence_tasks`` in ``$LN_ZOO_DATA``) or in a subfolder with
    the task's name: ``rt-polarity.pos`` and ``.neg`` (MR), ``custrev.pos`` and ``.neg`` (CR),
    ``subj.objective`` and ``subj.subjective``, or ``plot.tok.gt9.5000`` and ``quote.tok.gt9.5000``
    (SUBJ), ``mpqa.pos`` and ``.neg`` (MPQA), ``SICK_train.txt``, ``SICK_trial.txt`` and
    ``SICK_test_annotated.txt`` (SICK). As in the released code, blank lines are skipped, and
    ``split_words`` tokenises: ``it's`` becomes ``it 's``.
    """
    check_choice("task", name, TASKS)
    folder = local_folder(root, _FOLDER)
    if folder is None or not folder.is_dir():
        where = "" if folder is None else f" {folder}"
        raise FileNotFoundError(
            f"no folder{where} of sentence tasks: give one by --data (root= in Python), or "
            f"a folder {_FOLDER} in $LN_ZOO_DATA"
        )
    task = _read_sick(folder) if name == "SICK" else _read_classes(folder, name)
    return task.map(_words if split_words else _blanks)


def _words(sentence: str) -> str:
    return " ".join(
        word
        for part in english_tokens.split_sentences(sentence)
        for word in english_tokens.split_words(part)
    )


def _blanks(sentence: str) -> str:
    return " ".join(sentence.split())


def _read_classes(folder: Path, name: str) -> ClassificationTask:
    paths = _find(folder, name, _FILES[name])
    positive, negative = ([line for line in _lines(path, name) if line.strip()] for path in paths)
    counts = len(positive), len(negative)
    if not all(counts):
        raise ValueError(f"{paths[counts.index(0)]} holds no sentence: copy it again")
    _check_official(name, counts)
    labels = np.repeat(np.array([1, 0]), counts)
    return ClassificationTask(name, positive + negative, labels)


def _read_sick(folder: Path) -> RelatednessTask:
    train, trial, test = (_read_pairs(path) for path in _find(folder, "SICK", [_SICK]))
    _check_official("SICK", tuple(len(part.scores) for part in (train, trial, test)))
    return RelatednessTask("SICK", train, trial, test)


def _read_pairs(path: Path) -> SentencePairs:
    # Not the csv module, which bounds the length of fields.
    header, *lines = (line.split("\t") for line in _lines(path, "SICK"))
    if not set(_COLUMNS) <= set(header):
        raise ValueError(
            f"{path} must be a table with tabs and the columns {', '.join(_COLUMNS)}, and has "
            f"{', '.join(header)[:_SHOWN]}"
        )
    pairs = []
    for number, fields in enumerate(lines, 2):
        if not any(fields):
            continue
        try:
            row = dict(zip(header, fields, strict=True))
            first, second, score = (row[column] for column in _COLUMNS)
            valid = 1 <= float(score) <= 5 and first.split() and second.split()
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                f"{path}, line {number}: expected {len(header)} fields, with two sentences and a "
                f"score from 1 to 5, got {str(fields)[:_SHOWN]}"
            )
        pairs.append((first, second, float(score)))
    if not pairs:
        raise ValueError(f"{path} holds no sentence: copy it again")
    firsts, seconds, scores = zip(*pairs, strict=True)
    return SentencePairs(list(firsts), list(seconds), np.array(scores))


def _find(folder: Path, name: str, choices: Sequence[tuple[str, ...]]) -> list[Path]:
    for place in (folder / name, folder):
        for names in choices:
            paths = [place / file for file in names]
            if all(path.is_file() for path in paths):
                return paths
    raise FileNotFoundError(
        f"{folder} has no {' or '.join(' and '.join(names) for names in choices)}, in a folder "
        f"{name} or by themselves"
    )


def _lines(path: Path, name: str) -> list[str]:
    content = read_file(path, _MAX_BYTES)
    try:
        text = decode(content, path, encoding="utf-8-sig")
    except ValueError:
        if name not in _LATIN_1:
            raise
        text = content.decode("latin-1")
    # Not splitlines: U+0085 in the authors' Latin-1 files is an ellipsis.
    return [line.rstrip("\r") for line in text.split("\n")]


def _check_official(name: str, counts: tuple[int, ...]) -> None:
    if counts != _OFFICIAL[name]:
        here, there = (" + ".join(f"{n:,}" for n in c) for c in (counts, _OFFICIAL[name]))
        rank_zero_warn(
            f"{name} has {here} items here and {there} officially: its scores cannot be compared "
            "with published ones"
        )
