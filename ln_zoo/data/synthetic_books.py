"""Books out of a small grammar: no data needed, and neighbours share words."""

from __future__ import annotations

from typing import Any

import numpy as np

from ln_zoo.data.corpus import Corpus
from ln_zoo.data.loading import check_at_least
from ln_zoo.data.sentence_triples import BookData, SamplerName

# A paragraph keeps to the words of one place and to one of its people.
_PLACES = {
    "harbour": ("boat sail net captain tide rope", "mended watched pulled painted lost"),
    "kitchen": ("bread kettle apple cook plate fire", "washed baked burned carried wanted"),
    "forest": ("tree owl path hunter river stone", "followed heard climbed feared found"),
    "school": ("book pencil teacher bell map window", "read opened forgot drew broke"),
    "market": ("basket coin horse merchant cheese cart", "sold bought weighed stole praised"),
}
_PEOPLE = ("anna", "john", "the old man", "the girl", "my brother", "mrs brown")
_QUALITIES = ("old", "small", "red", "broken", "heavy", "quiet", "fine")
_TIMES = ("then", "later", "soon", "afterwards", "suddenly", "again")


class SyntheticBooks(BookData):
    """Books of a small grammar, drawn at random: no download, made in a moment.

    Sentences of a paragraph are about the same place and person, so that a sentence tells something
    of its neighbours. For tests and first steps: nothing learnt of them is of use elsewhere.

    Args:
        books: number of books, the held-out ones among them.
        paragraphs: paragraphs of each book, of four to eight sentences.
        data_seed: seed of the text.
        batch_size: training triples per step of one process.
        max_length: triples of which a sentence has as many words or more are left out.
        sampler: ``round_robin`` or ``proportional``, as `BookData`.
        across_books: let triples of a set reach over the end of a book.
        val_books: books held out for validation: how many, drawn by ``split_seed``, or their names.
        test_books: books held out for the test, likewise.
        val_triples: how many triples of the validation books are scored; default: all.
        split_seed: seed of the books that are held out.
        vocabulary: words that have numbers of their own, or a file with one per line; default: the
            most frequent of the training books.
        vocabulary_size: numbers of the default vocabulary.
        seed: seed of the order of training triples.
        eval_batch_size: triples per batch in evaluation; changes no result.
        num_workers: processes that fetch batches; 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out training batches of fewer than ``batch_size`` triples.

    Raises:
        ValueError: a value that is none of those above.

    Example:
        >>> data = SyntheticBooks(batch_size=4)
        >>> data.setup()
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch.source.tokens.shape[0], len(batch.source.lengths.unique())
        (4, 1)
    """

    name = "synthetic_books"

    def __init__(
        self,
        books: int = 12,
        paragraphs: int = 20,
        data_seed: int = 0,
        batch_size: int = 16,
        max_length: int = 30,
        sampler: SamplerName = "round_robin",
        across_books: bool = False,
        val_books: int | list[str] = 2,
        test_books: int | list[str] = 2,
        val_triples: int | None = None,
        split_seed: int = 0,
        vocabulary: list[str] | str | None = None,
        vocabulary_size: int = 1000,
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
        check_at_least(3, books=books)
        check_at_least(1, paragraphs=paragraphs)
        check_at_least(0, data_seed=data_seed)
        self.number_of_books = books
        self.paragraphs = paragraphs
        self.data_seed = data_seed

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        return super().facts | {"paragraphs": self.paragraphs, "data_seed": self.data_seed}

    def read(self) -> Corpus:
        books = {}
        for number in range(self.number_of_books):
            rng = np.random.default_rng((self.data_seed, number))
            paragraphs = (_paragraph(rng) for _ in range(self.paragraphs))
            books[f"book-{number:03}"] = [sentence for part in paragraphs for sentence in part]
        return Corpus.of(books)


def _paragraph(rng: np.random.Generator) -> list[list[str]]:
    """Four to eight sentences about one person at one place."""
    place = str(rng.choice(list(_PLACES)))
    things, deeds = (words.split() for words in _PLACES[place])
    person = str(rng.choice(_PEOPLE))
    sentences = []
    for number in range(int(rng.integers(4, 9))):
        thing, other = rng.choice(things, 2, replace=False)
        words = [] if number == 0 or rng.random() < 0.6 else [str(rng.choice(_TIMES))]
        words += [*(person.split() if number == 0 else ["she" if rng.random() < 0.2 else "they"])]
        words += [str(rng.choice(deeds)), "the"]
        words += [str(rng.choice(_QUALITIES))] if rng.random() < 0.4 else []
        words += [str(thing)]
        if number == 0 or rng.random() < 0.3:
            words += ["in", "the", place]
        if rng.random() < 0.3:
            words += ["with", "the", str(other)]
        sentences.append([*words, "."])
    return sentences
