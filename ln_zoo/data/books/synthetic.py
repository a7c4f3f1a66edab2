"""Random books from a small grammar."""

from __future__ import annotations

from typing import Any

import numpy as np

from ln_zoo.data.books.dataset import BookData
from ln_zoo.data.books.files import Corpus
from ln_zoo.utils.checks import check_at_least

# A paragraph uses the words of one place and one person.
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
    """Random books from a small grammar, for tests and first steps; no download.

    Sentences of a paragraph share a place and a person, so that a sentence predicts its neighbours.

    Args:
        books: number of books, including the held-out ones.
        paragraphs: paragraphs of each book, of four to eight sentences.
        data_seed: seed of the text.
    """

    name = "synthetic_books"

    def __init__(
        self,
        books: int = 12,
        paragraphs: int = 20,
        data_seed: int = 0,
        batch_size: int = 16,
        val_books: int | list[str] = 2,
        test_books: int | list[str] = 2,
        vocabulary_size: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            val_books=val_books,
            test_books=test_books,
            vocabulary_size=vocabulary_size,
            **options,
        )
        check_at_least(3, books=books)
        check_at_least(1, paragraphs=paragraphs)
        check_at_least(0, data_seed=data_seed)
        self.number_of_books = books
        self.paragraphs = paragraphs
        self.data_seed = data_seed

    @property
    def metadata(self) -> dict[str, Any]:
        return super().metadata | {"paragraphs": self.paragraphs, "data_seed": self.data_seed}

    def read(self) -> Corpus:
        books = {}
        for number in range(self.number_of_books):
            rng = np.random.default_rng((self.data_seed, number))
            paragraphs = (_paragraph(rng) for _ in range(self.paragraphs))
            books[f"book-{number:03}"] = [sentence for part in paragraphs for sentence in part]
        return Corpus.of(books)


def _paragraph(rng: np.random.Generator) -> list[list[str]]:
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
