"""Cloze questions in the format of the CNN corpus (Hermann et al. 2015)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ln_zoo.data.cloze.dataset import ClozeData
from ln_zoo.data.cloze.files import (
    Question,
    find_json_lines,
    find_question_folders,
    read_json_lines,
    read_question_archive,
    read_question_folder,
)
from ln_zoo.data.folders import listing, local_folder

_HELP = (
    "--data.root (root= in Python) names a folder of question files or of JSON lines or a tar "
    "archive; default: a folder cloze_qa in $LN_ZOO_DATA"
)


class ClozeQA(ClozeData):
    """A corpus of cloze questions, in one of three forms.

    * The CNN distribution: folders ``training``, ``validation`` and ``test`` of ``.question``
      files, in ``root``, or in ``questions`` or ``cnn/questions`` of it.
    * The same as an archive; ``root`` is the file.
    * JSON lines: ``{corpus}_train.jsonl``, ``{corpus}_valid.jsonl`` and ``{corpus}_test.jsonl``,
      each plain, ``.gz`` or ``.xz``, with the strings ``id``, ``passage``, ``query`` and
      ``answer``.

    Tables list the dataset under its corpus, with the number of sentences: ``cnn_top4``.

    Args:
        corpus: name of the corpus, and of its files of JSON lines.
        root: folder or archive; default: the folder ``cloze_qa`` in ``$LN_ZOO_DATA``.
    """

    def __init__(
        self,
        corpus: str = "bbc",
        root: str | None = None,
        batch_size: int = 64,
        sentences: int | None = 4,
        min_count: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, sentences, min_count=min_count, **options)
        if not corpus or set(corpus) & set("/\\"):
            raise ValueError(f"corpus must be a name such as 'bbc', got {corpus!r}")
        self.corpus = corpus
        self.name = corpus if sentences is None else f"{corpus}_top{sentences}"
        self._root = local_folder(root, "cloze_qa")

    @property
    def root(self) -> Path:
        if self._root is None or not self._root.exists():
            what = "no cloze questions" if self._root is None else f"no folder or file {self._root}"
            raise FileNotFoundError(f"{what}: {_HELP}")
        return self._root

    @property
    def vocabulary(self) -> list[str] | None:
        # `prepare_data` raises if there are no files.
        nothing = self._vocabulary is None and self._root is None
        return None if nothing else super().vocabulary

    def prepare_data(self) -> None:
        _ = self.root  # there is no download

    def read(self) -> Mapping[str, Iterable[Question]]:
        root = self.root
        if root.is_file():
            return read_question_archive(root)
        if files := find_json_lines(root, self.corpus):
            return {name: read_json_lines(path) for name, path in files.items()}
        if folders := find_question_folders(root):
            return {name: read_question_folder(folder) for name, folder in folders.items()}
        raise ValueError(
            f"{root} has no corpus {self.corpus!r}: expected {self.corpus}_train.jsonl (.xz, .gz) "
            "and its siblings, or folders training, validation and test of .question files; found "
            f"{listing(root)}"
        )
