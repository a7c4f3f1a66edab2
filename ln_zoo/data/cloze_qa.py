"""Cloze questions about real texts: the CNN corpus (Hermann et al. 2015), and others like it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ln_zoo.data.cloze import ClozeData, Entities
from ln_zoo.data.cloze_files import (
    Question,
    find_json_lines,
    find_question_folders,
    read_json_lines,
    read_question_archive,
    read_question_folder,
)
from ln_zoo.data.mnist import local_folder

_HELP = (
    "--data.root (root= in Python) names a folder of question files or of JSON lines or a tar "
    "archive; without it a folder cloze_qa in $LN_ZOO_DATA is taken"
)


class ClozeQA(ClozeData):
    """A corpus of cloze questions, in one of three forms.

    * The CNN distribution: folders ``training``, ``validation`` and ``test`` of ``.question``
      files, in ``root``, in ``questions`` or in ``cnn/questions`` of it.
    * The same as a tar archive, compressed or not; ``root`` is the file.
    * JSON lines: ``{corpus}_train.jsonl``, ``{corpus}_valid.jsonl`` and ``{corpus}_test.jsonl``,
      each plain, ``.gz`` or ``.xz``, with the texts ``id``, ``passage``, ``query`` and ``answer``.

    In tables the dataset is called by its corpus, with the number of sentences where passages were
    cut: ``cnn_top4``.

    Args:
        corpus: of which the files of JSON lines are called; of question files it is the name only.
        root: folder or archive; default: the folder ``cloze_qa`` in the folder named by the
            environment variable ``LN_ZOO_DATA``.
        batch_size: training questions per step of one process.
        sentences: sentences of each passage that are kept, those with the most words of the query;
            ``None``: all.
        entities: how entities are renamed in training: ``example``, ``batch``, ``order`` or
            ``file``; see `ln_zoo.data.ClozeData`.
        eval_entities: the same in evaluation.
        vocabulary: the known words, or a file with one a line; default: those of the training
            passages and queries.
        min_count: how often a word must occur in them.
        vocabulary_size: numbers V in all, the two special tokens among them; ``None``: any.
        max_entities: how many entities the vocabulary has; ``None``: all of the training set.
        seed: seed of the order of training questions and of the permutations of entities.
        eval_batch_size: questions per batch in evaluation.
        num_workers: processes that fetch batches.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` questions.

    Raises:
        FileNotFoundError: no such folder or archive, or a set is missing.
        ValueError: the folder holds none of the forms, a file is damaged, a question cannot be
            answered (no placeholder, an answer that is not in the passage, ...), or a value that is
            none of those above.
    """

    def __init__(
        self,
        corpus: str = "bbc",
        root: str | None = None,
        batch_size: int = 64,
        sentences: int | None = 4,
        entities: Entities = "example",
        eval_entities: Entities | None = None,
        vocabulary: list[str] | str | None = None,
        min_count: int = 2,
        vocabulary_size: int | None = None,
        max_entities: int | None = None,
        seed: int = 0,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            sentences,
            entities,
            eval_entities,
            vocabulary,
            min_count,
            vocabulary_size,
            max_entities,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        if not corpus or set(corpus) & set("/\\"):
            raise ValueError(f"corpus must be a name such as 'bbc', got {corpus!r}")
        self.corpus = corpus
        self.name = corpus if sentences is None else f"{corpus}_top{sentences}"
        self._root = local_folder(root, "cloze_qa")

    @property
    def root(self) -> Path:
        """The folder or archive of the corpus.

        Raises:
            FileNotFoundError: there is none.
        """
        if self._root is None or not self._root.exists():
            what = "no cloze questions" if self._root is None else f"no folder or file {self._root}"
            raise FileNotFoundError(f"{what}: {_HELP}")
        return self._root

    @property
    def vocabulary(self) -> list[str] | None:
        # Whoever needs the words hears what is missing from `prepare_data`.
        nothing = self._vocabulary is None and self._root is None
        return None if nothing else super().vocabulary

    def prepare_data(self) -> None:
        _ = self.root  # it cannot be fetched

    def read(self) -> Mapping[str, Iterable[Question]]:
        root = self.root
        if root.is_file():
            return read_question_archive(root)
        if files := find_json_lines(root, self.corpus):
            return {name: read_json_lines(path) for name, path in files.items()}
        if folders := find_question_folders(root):
            return {name: read_question_folder(folder) for name, folder in folders.items()}
        found = sorted(os.listdir(root))
        raise ValueError(
            f"{root} has no corpus {self.corpus!r}: expected {self.corpus}_train.jsonl (.xz, .gz) "
            "and its siblings, or folders training, validation and test of .question files; found "
            f"{', '.join(found[:8]) or 'nothing'}"
        )
