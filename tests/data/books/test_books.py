"""Books as triples: what batches hold, their order, where texts may lie, bad texts."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from archive_support import packed
from data_support import ready
from refusals import refuses

from ln_zoo.data import Books, Corpus, SentenceTriples, SyntheticBooks, TripleSet
from ln_zoo.data.books.batches import TripleBatches
from ln_zoo.utils.vocabulary import Vocabulary

RNG = np.random.default_rng(3)
WORDS = [f"w{i}" for i in range(30)]
#: Sentences of 1 to 8 words, in books of several sizes, one of them too short for a triple.
TEXT = {
    f"book-{number}": [
        [str(w) for w in RNG.choice(WORDS, RNG.integers(1, 9), p=np.arange(1, 31) / 465)]
        for _ in range(sentences)
    ]
    for number, sentences in enumerate([40, 2, 31, 57, 1, 23])
}


def expected_triples(books: list[str], max_length: int, across: bool = False) -> list[tuple]:
    """Source, next and previous sentence, words each, by the definition."""
    parts = [TEXT[name] for name in books]
    if across:
        parts = [[sentence for part in parts for sentence in part]]
    return [
        (part[i], part[i + 1], part[i - 1])
        for part in parts
        for i in range(1, len(part) - 1)
        if max(map(len, part[i - 1 : i + 2])) < max_length
    ]


def words_of(batch: SentenceTriples, vocabulary: Vocabulary) -> list[tuple]:
    """The triples of a batch as words; checks the ends and the padding."""
    for tokens, lengths in batch:
        assert tokens.dtype == lengths.dtype == torch.int64
        assert tokens.shape == (len(lengths), lengths.max())
        ended = torch.arange(tokens.shape[1]) >= lengths[:, None] - 1
        assert torch.equal(tokens == 0, ended)
    return [
        tuple(
            vocabulary.words(row[: n - 1].tolist())
            for row, n in ((part.tokens[i], int(part.lengths[i])) for part in batch)
        )
        for i in range(len(batch.source.lengths))
    ]


def triples(max_length: int = 30, books: list[str] | None = None, **options) -> TripleSet:
    whole = Corpus.of(TEXT)
    chosen = [book for book in whole.books if books is None or book.name in books]
    return TripleSet(whole, chosen, Vocabulary(WORDS), max_length, **options)


def batches(data: TripleSet, batch_size: int, epoch: int = 0, **options) -> list[torch.Tensor]:
    sampler = TripleBatches(data, batch_size, **options)
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def training(data: TripleSet, batch_size: int, epoch: int = 0, **options) -> list[torch.Tensor]:
    return batches(data, batch_size, epoch, training=True, shuffle=True, **options)


@pytest.mark.parametrize("books", [list(TEXT), ["book-0", "book-3", "book-4"]], ids=["all", "some"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("max_length", [30, 6])
def test_triples_are_those_of_the_definition(
    across: bool, max_length: int, books: list[str]
) -> None:
    data = triples(max_length, books, across_books=across)
    found = words_of(data[torch.arange(len(data))], Vocabulary(WORDS))
    expected = expected_triples(books, max_length, across)
    assert found == expected
    assert data.lengths.tolist() == [len(source) for source, _, _ in expected]


def test_unknown_words_and_part_of_a_set() -> None:
    data = triples(books=["book-0"])
    data._tokens[:] = 1
    picked = data.pick([3, 5])
    assert len(picked) == 2
    assert len(data) == 38
    assert set(picked[torch.tensor([1])].source.tokens[0].tolist()) == {0, 1}
    assert torch.equal(picked[torch.tensor([1])].next.tokens, data[torch.tensor([5])].next.tokens)


@pytest.mark.parametrize("sampler", ["round_robin", "proportional"])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_training_batches_are_of_one_length_and_take_each_triple_once(
    sampler: str, batch_size: int
) -> None:
    data = triples(sampler=sampler)
    of_each = Counter(data.lengths.tolist())
    left_over = sum(count % batch_size == 1 for count in of_each.values())
    orders = []
    for epoch in range(3):
        found = training(data, batch_size, epoch)
        for batch in found:
            assert 2 <= len(batch) <= batch_size
            assert len(set(data.lengths[batch])) == 1
        indices = torch.cat(found).tolist()
        assert len(set(indices)) == len(indices) == len(data) - left_over
        orders.append(indices)
    assert orders[0] != orders[1] != orders[2]
    assert orders[1] == torch.cat(training(data, batch_size, 1)).tolist()
    assert orders[1] != torch.cat(training(data, batch_size, 1, seed=5)).tolist()
    whole = training(data, batch_size, drop_last=True)
    assert {len(batch) for batch in whole} == {batch_size}


def test_round_robin_takes_each_length_in_turn_until_it_is_used_up() -> None:
    data = triples()
    lengths = [int(data.lengths[batch[0]]) for batch in training(data, 4)]
    remaining = Counter(lengths)
    order = lengths[: len(remaining)]
    assert set(order) == set(remaining)
    expected = []
    while remaining.total():
        for length in order:
            if remaining[length]:
                remaining[length] -= 1
                expected.append(length)
    assert lengths == expected
    other = [int(data.lengths[batch[0]]) for batch in training(data, 4, epoch=1)]
    assert other[: len(order)] != order


def test_proportional_mixes_the_lengths() -> None:
    data = triples(sampler="proportional")
    lengths = [int(data.lengths[batch[0]]) for batch in training(data, 2)]
    common = Counter(lengths).most_common(1)[0][0]
    places = np.flatnonzero(np.array(lengths) == common) / len(lengths)
    # Under round_robin the mean place of the commonest would be far behind the middle.
    assert abs(places.mean() - 0.5) < 0.15


def test_evaluation_takes_the_longest_first() -> None:
    data = triples()
    lengths = data.lengths[torch.cat(batches(data, 16))]
    assert all(a >= b for a, b in pairwise(lengths))


def test_too_few_triples_for_the_processes() -> None:
    message = "make 0 batches of 64 with sources of one length"
    refuses(message, training, triples(), 64, drop_last=True)


def lines_of(book: str) -> str:
    return "".join(" ".join(sentence) + "\n" for sentence in TEXT[book])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in TEXT:
        (folder / f"{name}.txt").write_text(lines_of(name))
    return folder


def everything(corpus: Corpus) -> dict[str, list[list[str]]]:
    return {
        book.name: [corpus.sentence(i).split() for i in range(book.start, book.stop)]
        for book in corpus.books
    }


def test_a_folder_of_tokenised_sentences(folder: Path) -> None:
    data = ready(
        Books(str(folder), val_books=["book-3"], test_books=["book-5"], vocabulary_size=20)
    )
    assert everything(data.corpus) == TEXT
    counts: Counter[str] = Counter()
    for number in (0, 2, 1, 4):
        counts.update(word for sentence in TEXT[f"book-{number}"] for word in sentence)
    assert data.vocabulary == list(Vocabulary.of_counts(counts, 20))
    assert len(data.vocabulary) == 18
    triples = data.evaluation_set("test")
    expected = expected_triples(["book-5"], 30)
    known = set(data.vocabulary)
    expected = [
        tuple([w if w in known else "<unk>" for w in sentence] for sentence in triple)
        for triple in expected
    ]
    assert words_of(triples[torch.arange(len(triples))], Vocabulary(data.vocabulary)) == expected
    assert list(data.sentences("test")) == [" ".join(s) for s in TEXT["book-5"]]
    facts = data.metadata
    assert (facts["train_books"], facts["val_size"], facts["test_size"]) == (4, 55, 21)
    unknown = sum(w not in known for s in TEXT["book-5"] for w in s)
    assert facts["test_unknown"] == round(unknown / sum(map(len, TEXT["book-5"])), 5)
    assert not data.corpus.numbers(7).flags.owndata


def test_compressed_texts_and_archives_hold_the_same(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "books-1.tar.gz", "w:gz") as archive:
        for name in list(TEXT)[:4]:
            archive.add(folder / f"{name}.txt", f"books/{name}.txt")
        archive.add(folder / "book-5.txt", "books/book-0.txt")  # the same name again
        hidden = tarfile.TarInfo("books/._book-0.txt")
        hidden.size = 3
        archive.addfile(hidden, io.BytesIO(b"\xff\xfe\xfd"))
    (packed / "more").mkdir()
    (packed / "more" / "book-4.txt.gz").write_bytes(gzip.compress(lines_of("book-4").encode()))
    (packed / "more" / "book-5.txt").write_bytes(b"\xef\xbb\xbf" + lines_of("book-5").encode())
    (packed / "README.md").write_text("not a book")
    assert everything(Books(str(packed)).corpus) == TEXT
    one = Books(str(packed / "books-1.tar.gz")).corpus
    assert everything(one) == {name: TEXT[name] for name in list(TEXT)[:4]}


def test_the_words_are_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = everything(Books(str(folder)).corpus)
    monkeypatch.setattr("ln_zoo.data.books.files._make", None)
    again = ready(Books(str(folder), vocabulary_size=9, val_books=1, test_books=2, max_length=5))
    assert everything(again.corpus) == first
    refuses("NoneType", lambda: Books(str(folder), lowercase=False).corpus, error=TypeError)
    (folder / "book-0.txt").write_text("another text .\n")
    refuses("NoneType", lambda: Books(str(folder)).corpus, error=TypeError)
    monkeypatch.undo()
    assert everything(Books(str(folder)).corpus)["book-0"] == [["another", "text", "."]]
    assert everything(Books(str(folder), leave_out=["book-0"]).corpus) == {
        name: sentences for name, sentences in TEXT.items() if name != "book-0"
    }


def test_the_words_are_kept_elsewhere_where_the_folder_is_read_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_CACHE", str(tmp_path / "cache"))
    folder.chmod(0o555)
    assert everything(Books(str(folder)).corpus) == TEXT
    assert not (folder / ".cache").exists()
    assert list((tmp_path / "cache" / "data").rglob("corpus.json"))
    monkeypatch.setenv("LN_ZOO_CACHE", "/dev/null")
    message = "set LN_ZOO_CACHE to a folder that can be written"
    refuses(message, lambda: Books(str(folder)).corpus, error=OSError)


def test_a_process_that_was_killed_leaves_nothing_behind(folder: Path, monkeypatch) -> None:
    monkeypatch.delenv("LN_ZOO_CACHE", raising=False)
    _ = Books(str(folder)).corpus
    (kept,) = (folder / ".cache").glob("books-*[!k]")
    (kept / "corpus.json").unlink()
    (kept.parent / f".{kept.name}-half").mkdir()
    assert everything(Books(str(folder)).corpus) == TEXT
    assert {p.name for p in kept.parent.iterdir()} == {kept.name, f"{kept.name}.lock"}


def test_several_processes_divide_a_text_into_the_same_words(folder: Path) -> None:
    assert everything(Books(str(folder), num_proc=2).corpus) == TEXT


def test_paragraphs_are_divided_into_sentences_and_words(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    text = (
        '"I don\'t know, Mr. Brown!" she cried.  "It\'s late."\n'
        "\n"
        "CHAPTER II\n"
        "He (the doctor) had \u00a320--no more... Was it J. Smith's?\n"
    )
    (tmp_path / "a.txt").write_text(text)
    data = Books(str(tmp_path), lines="paragraphs", lowercase=False)
    assert everything(data.corpus)["a"] == [
        ["``", "I", "do", "n't", "know", ",", "Mr.", "Brown", "!", "''", "she", "cried", "."],
        ["``", "It", "'s", "late", ".", "''"],
        ["CHAPTER", "II"],
        [
            *("He", "(", "the", "doctor", ")", "had", "£20", "--", "no", "more", "...", "Was"),
            *("it", "J.", "Smith", "'s", "?"),
        ],
    ]
    assert data.corpus.empty_lines == 1
    small = Books(str(tmp_path), lines="paragraphs").corpus
    assert small.sentence(0) == "`` i do n't know , mr. brown ! '' she cried ."


def test_paragraphs_need_nltk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A text.\n")
    monkeypatch.setitem(sys.modules, "nltk", None)
    message, data = r"needs nltk: .*'ln-zoo\[text\]'", Books(str(tmp_path), lines="paragraphs")
    refuses(message, lambda: data.corpus, error=ModuleNotFoundError)


def test_lines_that_look_like_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("many words " * 40 + "\n")
    with pytest.warns(UserWarning, match=r"80 words on average.*--data.lines paragraphs"):
        _ = Books(str(tmp_path)).corpus


def test_books_are_held_out_whole_by_the_seed(folder: Path) -> None:
    def split(**options) -> dict[str, list[str]]:
        return {
            name: [book.name for book in books]
            for name, books in Books(str(folder), **options).books.items()
        }

    found = split(val_books=2, test_books=1)
    assert [len(found[name]) for name in ("train", "val", "test")] == [3, 2, 1]
    assert sorted(name for names in found.values() for name in names) == sorted(TEXT)
    assert found == split(val_books=2, test_books=1, seed=4)
    assert found != split(val_books=2, test_books=1, split_seed=1)
    named = split(val_books=["book-0", "book-3"], test_books=1)
    assert named["val"] == ["book-0", "book-3"]
    assert named["test"][0] not in named["val"]


def test_sections_of_a_file_with_many_books(folder: Path) -> None:
    given = {"root": str(folder / "book-3.txt"), "section_sentences": 20}
    data = Books(**given)
    found = [(book.name, book.start, book.stop) for book in data.corpus.books]
    assert found == [("book-3-1", 0, 20), ("book-3-2", 20, 40), ("book-3-3", 40, 57)]
    one = ready(Books(**given, val_books=1, test_books=1))
    assert len(one.training_set()) in (18, 15)


def test_part_of_the_validation_triples(folder: Path) -> None:
    data = ready(Books(str(folder), val_books=["book-3"], test_books=["book-0"], val_triples=10))
    assert [len(data.evaluation_set(name)) for name in ("val", "test")] == [10, 38]
    assert len(data.evaluation_set("val", 4)) == 4
    assert data.evaluation_set("val").sources.tolist()[:2] == [74, 79]
    assert sum(len(batch.source.lengths) for batch in data.val_dataloader()) == 10


def test_a_given_vocabulary_needs_no_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    Vocabulary(["b", "a"]).write(tmp_path / "words.txt")
    assert Books(vocabulary=["b", "a"]).vocabulary == ["b", "a"]
    assert Books(vocabulary=str(tmp_path / "words.txt")).vocabulary == ["b", "a"]
    message = "no books: give a folder of texts by --data.root"
    refuses(message, lambda: Books().vocabulary, error=FileNotFoundError)


@pytest.mark.parametrize(
    ("files", "mentioned"),
    [
        ({"a.txt": b"fine\n\nbad \xe9t\xe9\n"}, r"a\.txt.*byte 10"),
        ({"a.tar": packed({"b.txt": b"ok\n\xff"})}, r"a\.tar, b\.txt.*byte 3"),
        ({"a.txt.gz": gzip.compress(b"long " * 500)[:-9]}, r"a\.txt\.gz"),
        ({"a.tar.gz": b"no archive"}, r"a\.tar\.gz"),
        ({"a.txt": b"\n \n"}, r"a\.txt"),
        ({"a.txt": b"", "b.txt": b"\t"}, r"a\.txt and 1 more"),
        ({"a.txt": b"x" * 10_000_001}, r"a\.txt.*10,000,000"),
        ({"a.txt.gz": gzip.compress(bytes(10_000_001))}, r"a\.txt\.gz.*10,000,000"),
        ({"a.txt": b"one .\n" * 9}, r"books.*val_books"),
    ],
    ids=range(9),
)
def test_bad_texts_are_named(tmp_path: Path, files: dict[str, bytes], mentioned: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refuses(mentioned, Books(str(tmp_path)).setup)
    assert not list(tmp_path.rglob("corpus.json")) or "val_books" in mentioned


@pytest.mark.parametrize(("val", "of"), [("a", "train set and both its"), ("b", "val set")])
def test_a_book_of_one_sentence_has_no_triple(tmp_path: Path, val: str, of: str) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("one sentence .\n" * (1 if name == "b" else 5))
    data = Books(str(tmp_path), val_books=[val], test_books=["c"])
    refuses(f"no sentence of the {of}", data.setup)


def test_words_that_are_all_unknown(folder: Path) -> None:
    data = Books(str(folder), val_books=1, test_books=1, vocabulary=["mot", "parole"])
    refuses(r"none of the words .* begins with mot, parole", data.setup)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lines": "words"}, "lines.*words"),
        ({"section_sentences": 2}, "section_sentences.*2"),
        ({"num_proc": 0}, "num_proc.*0"),
        ({"val_books": ["book-9"]}, r"val_books.*book-9"),
        ({"val_books": ["book-1"], "test_books": ["book-1"]}, "book-1"),
        ({"leave_out": ["book-9"]}, r"leave_out.*book-9"),
    ],
)
def test_arguments_are_checked(folder: Path, options: dict, message: str) -> None:
    refuses(message, lambda: Books(str(folder), **options).books)


@pytest.mark.parametrize("name", ["nothing", "sub"])
def test_folders_without_books(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    refuses(name, lambda: Books(str(folder / name)).corpus, error=FileNotFoundError)


def test_synthetic_books_depend_on_their_seed_and_can_be_learnt() -> None:
    one, same, other = (SyntheticBooks(data_seed=seed) for seed in (0, 0, 1))
    text = list(one.sentences("train"))
    assert text == list(same.sentences("train")) != list(other.sentences("train"))
    one.setup()
    data = one.training_set()
    # Neighbours share rare words more often than other sentences do.
    rare = {word for word, n in Counter(" ".join(text).split()).items() if n < len(text) / 10}
    words = [set(one.corpus.sentence(i).split()) & rare for i in data.sources.tolist()]
    near = np.mean([bool(a & b) for a, b in pairwise(words)])
    far = np.mean([bool(a & b) for a, b in zip(words, words[200:], strict=False)])
    assert near > 2 * far
