"""Books: a folder of texts as sentence triples (Kiros et al. 2015)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from ln_zoo.data.books.dataset import BookData
from ln_zoo.data.books.files import Corpus, Lines
from ln_zoo.data.folders import local_folder
from ln_zoo.data.text_files import find_texts
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional


class Books(BookData):
    """A folder of books as triples: a sentence, the next and the previous one.

    A book is a file or a member of an archive that ends in ``.txt`` or ``.txt.gz``, in ``root`` or
    its subfolders. By default a line is a sentence with words separated by white space, as in
    BookCorpus. With ``lines="paragraphs"`` nltk splits each line into sentences and words.

    The tokenised text is cached and mapped into memory, so the corpus may be larger than memory.
    The cache does not depend on the vocabulary, ``max_length`` or the held-out books.

    Args:
        root: folder of the books, or one text or archive; default: the folder ``books`` in
            ``$LN_ZOO_DATA``.
        lines: content of a line, ``sentences`` or ``paragraphs``.
        lowercase: convert to lower case, as in the sentence tasks of the paper. The released code
            keeps capital letters.
        section_sentences: split each text into books of this many sentences, for files of many
            books without marks, as BookCorpus. Default: a text is a book.
        leave_out: names of books to skip.
        num_proc: processes that tokenise the text.
    """

    name = "books"

    def __init__(
        self,
        root: str | None = None,
        lines: Lines = "sentences",
        lowercase: bool = True,
        section_sentences: int | None = None,
        leave_out: list[str] | None = None,
        num_proc: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("lines", lines, get_args(Lines))
        check_at_least(1, num_proc=num_proc)
        check_optional(3, section_sentences=section_sentences)
        self.lines = lines
        self.lowercase = lowercase
        self.section_sentences = section_sentences
        self.leave_out = leave_out or []
        self.num_proc = num_proc
        self._folder = local_folder(root, self.name)
        if self._folder is not None and not self._folder.exists():
            raise FileNotFoundError(f"no folder or file {self._folder}: give that of the books")

    @property
    def root(self) -> Path:
        if self._folder is None:
            raise FileNotFoundError(
                "no books: give a folder of texts by --data.root (root= in Python), or a folder "
                "books in $LN_ZOO_DATA"
            )
        return self._folder

    @property
    def preprocessing(self) -> dict[str, Any]:
        words = "white space" if self.lines == "sentences" else "Penn Treebank (nltk)"
        return {"words": words, "lowercase": self.lowercase} | super().preprocessing

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = super().metadata | {"lines": self.lines, "lowercase": self.lowercase}
        if self.section_sentences is not None:
            metadata["section_sentences"] = self.section_sentences
        if self.leave_out:
            metadata["left_out"] = self.leave_out
        return metadata

    def read(self) -> Corpus:
        texts = find_texts(self.root)
        if unknown := set(self.leave_out) - {text.name for text in texts}:
            raise ValueError(
                f"leave_out: no book {', '.join(sorted(unknown))} in {self.root}, which has "
                f"{', '.join(text.name for text in texts[:5])}, ..."
            )
        kept = [text for text in texts if text.name not in self.leave_out]
        folder = self.root if self.root.is_dir() else self.root.parent
        corpus = Corpus.read(kept, folder, self.lines, self.lowercase, self.num_proc)
        return corpus.in_sections(self.section_sentences) if self.section_sentences else corpus
