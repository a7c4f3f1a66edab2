"""Books: a folder of texts, as sentences with their neighbours (Kiros et al. 2015)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from ln_zoo.data.corpus import Corpus, Lines
from ln_zoo.data.loading import check_at_least, check_choice
from ln_zoo.data.mnist import local_folder
from ln_zoo.data.sentence_triples import BookData, SamplerName
from ln_zoo.data.text_files import find_texts


class Books(BookData):
    """A folder of books as triples: a sentence, the next and the previous one.

    A book is a file or member of an archive that ends in ``.txt`` or ``.txt.gz``, in ``root`` and
    its subfolders. In the form of BookCorpus, on which skip-thoughts were trained, a line is a
    sentence, whose words white space separates. With ``lines="paragraphs"`` a line is a paragraph;
    nltk divides it into sentences and words.

    The text is divided and numbered once, and kept as a dataset of Hugging Face ``datasets``, which
    is mapped into memory: the next start takes seconds, and the corpus may be larger than memory.
    The vocabulary, ``max_length`` and which books are held out may change from run to run without
    dividing anew.

    Without ``root`` the folder ``books`` in the folder named by the environment variable
    ``LN_ZOO_DATA`` is taken.

    Args:
        root: folder of the books, or one file or archive.
        lines: what a line is, ``sentences`` or ``paragraphs``.
        lowercase: turn capital letters into small ones, as the sentence tasks of the paper have
            them. The released code keeps them.
        section_sentences: cut each text into books of so many sentences; for files that hold many
            books without saying where one ends, as BookCorpus. Default: a text is a book.
        leave_out: names of books that are not read.
        num_proc: processes that divide the text, the first time.
        batch_size: training triples per step of one process.
        max_length: triples of which a sentence has as many words or more are left out.
        sampler: how training takes the lengths of sources in turn: ``round_robin``, one batch of
            each, or ``proportional``, as often as they occur. All sources of a training batch are
            of one length.
        across_books: let triples of a set reach over the end of a book, as the released code does.
        val_books: books held out for validation: how many, drawn by ``split_seed``, or their names
            (file names without endings).
        test_books: books held out for the test, likewise.
        val_triples: how many triples of the validation books are scored, at even distances;
            default: all.
        split_seed: seed of the books that are held out.
        vocabulary: words that have numbers of their own, or a file with one per line; default: the
            most frequent of the training books.
        vocabulary_size: numbers of the default vocabulary, the end of a sentence and the unknown
            word among them.
        seed: seed of the order of training triples; the splits do not depend on it.
        eval_batch_size: triples per batch in evaluation; changes no result.
        num_workers: processes that fetch batches.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out training batches of fewer than ``batch_size`` triples. Those of a
            single triple are always left out.

    Raises:
        FileNotFoundError: no such folder, or no text in it; without ``root`` and a folder in
            ``LN_ZOO_DATA`` when the books are to be read.
        ValueError: a value that is none of those above; when the books are read, a text that is not
            UTF-8 or damaged, a book that is not there, or no triple in a set.
        ModuleNotFoundError: ``lines="paragraphs"`` without nltk, when the books are read.
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
        batch_size: int = 64,
        max_length: int = 30,
        sampler: SamplerName = "round_robin",
        across_books: bool = False,
        val_books: int | list[str] = 4,
        test_books: int | list[str] = 4,
        val_triples: int | None = None,
        split_seed: int = 0,
        vocabulary: list[str] | str | None = None,
        vocabulary_size: int = 20_000,
        seed: int = 0,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            max_length,
            sampler,
            across_books,
            val_books,
            test_books,
            val_triples,
            split_seed,
            vocabulary,
            vocabulary_size,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        check_choice("lines", lines, get_args(Lines))
        check_at_least(1, num_proc=num_proc)
        if section_sentences is not None:
            check_at_least(3, section_sentences=section_sentences)
        self.lines = lines
        self.lowercase = lowercase
        self.section_sentences = section_sentences
        self.leave_out = leave_out or []
        self.num_proc = num_proc
        folder = local_folder(root, self.name)
        if folder is not None and not folder.exists():
            raise FileNotFoundError(f"no folder or file {folder}: give the one with the books")
        self._folder = folder

    @property
    def root(self) -> Path:
        """The folder of the books, or their file.

        Raises:
            FileNotFoundError: there is none.
        """
        if self._folder is None:
            raise FileNotFoundError(
                "no books: give a folder of texts by --data.root (root= in Python), or a folder "
                "books in $LN_ZOO_DATA"
            )
        return self._folder

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a sentence goes through before the model, as plain data."""
        words = "white space" if self.lines == "sentences" else "Penn Treebank (nltk)"
        return {"words": words, "lowercase": self.lowercase} | super().preprocessing

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts = super().facts | {"lines": self.lines, "lowercase": self.lowercase}
        if self.section_sentences is not None:
            facts["section_sentences"] = self.section_sentences
        if self.leave_out:
            facts["left_out"] = self.leave_out
        return facts

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
