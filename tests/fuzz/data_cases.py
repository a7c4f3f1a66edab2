"""Small copies of every dataset format, and mutations of their files."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from archive_support import packed
from data_support import idx, image_table, picture
from handwriting_support import drawn, small_distribution
from hypothesis import strategies as st
from scipy.io import savemat

from ln_zoo.data import (
    MNIST,
    BinarizedMNIST,
    Books,
    CaptionedImages,
    ClozeQA,
    IAMOnDB,
    SentenceFile,
)
from ln_zoo.data.pen.conversion import convert
from ln_zoo.data.pen.files import pack

Files = dict[str, bytes]


@dataclass(frozen=True)
class Format:
    """A dataset on disk.

    Attributes:
        files: content by path.
        data: makes the data module of a folder.
        checked: whether the format has a checksum, so that another content must be refused.
        stages: arguments of `setup`.
    """

    files: Callable[[], Files]
    data: Callable[[Path], Any]
    checked: bool = False
    stages: tuple[str, ...] = ("fit", "test")


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def idx_files() -> Files:
    rng = np.random.default_rng(0)
    files = {}
    for name, count in (("train", 12), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        files[f"{name}-images-idx3-ubyte"] = idx(images)
        files[f"{name}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8) % 10)
    return files


def amat() -> Files:
    rng = np.random.default_rng(0)
    return {
        f"binarized_mnist_{word}.amat": b"".join(
            b" ".join(b"%d" % pixel for pixel in row) + b"\n"
            for row in rng.integers(0, 2, (count, 784))
        )
        for word, count in (("train", 6), ("valid", 3), ("test", 3))
    }


def question(name: str) -> str:
    return (
        f"http://example/{name}\n\n@entity1 met {name} @entity0 .\n\nit was @placeholder there\n\n"
        "@entity1\n\n@entity0:Bo\n@entity1:Ada\n"
    )


def questions() -> Files:
    names = {"training": "abc", "validation": "d", "test": "e"}
    return {
        f"questions/{folder}/{name}.question": question(name).encode()
        for folder, letters in names.items()
        for name in letters
    }


def json_lines() -> Files:
    def row(name: str) -> bytes:
        fields = {
            "id": name, "source": "here", "passage": f"@entity1 met {name} @entity0 .",
            "query": "it was @placeholder there", "answer": "@entity1",
            "entities": {"@entity1": "Ada", "@entity0": "Bo"},
        }  # fmt: skip
        return json.dumps(fields).encode() + b"\n"

    parts = {"train": "abc", "valid": "d", "test": "e"}
    return {f"mine_{part}.jsonl": b"".join(map(row, names)) for part, names in parts.items()}


def books() -> Files:
    rng = np.random.default_rng(0)
    words = ["a", "dog", "saw", "the", "cat", "again", "."]
    return {
        f"b{k}.txt": "".join(
            " ".join(rng.choice(words, rng.integers(2, 7))) + "\n" for _ in range(12)
        ).encode()
        for k in range(4)
    }


def features(count: int) -> np.ndarray:
    return np.random.default_rng(count).random((count, 6), np.float32) + 0.01


def captions() -> Files:
    sizes = {"train": 6, "val": 4, "test": 3}
    files: Files = {}
    for split, count in sizes.items():
        lines = [f"a {split}{i} of {c}\n" for i in range(count) for c in range(5)]
        files[f"{split}.txt"] = "".join(lines).encode()
        files[f"images/10crop/{split}.npy"] = npy(features(count))
    return files


def karpathy() -> Files:
    images = [
        {
            "filename": f"{i}.jpg",
            "split": split,
            "sentences": [{"tokens": ["a", f"{split}{i}", "x" * (c + 1)]} for c in range(5)],
        }
        for i, split in enumerate(["train", "restval", "test", "val", "train", "val", "test"])
    ]
    content = json.dumps({"dataset": "coco", "images": images}).encode()
    return {"dataset_coco.json": content, "vgg.npy": npy(features(len(images)))}


def caption_table() -> Files:
    rows = [["image", "split", *(f"caption{i}" for i in range(5))]]
    for i, split in enumerate(["train", "dev", "unused", "test", "train"]):
        rows.append([f"{i}.jpg", split, *(f"A {split}{i} has {'x' * (c + 1)} ." for c in range(5))])
    table = "".join("\t".join(row) + "\n" for row in rows).encode()
    return {"captions.tsv": table, "mobilenetv2_pool.npy": npy(features(5).astype(np.float16))}


def matlab() -> Files:
    file = io.BytesIO()
    savemat(file, {"feats": features(7).T}, do_compression=True)
    return {"dataset_coco.json": karpathy()["dataset_coco.json"], "vgg.mat": file.getvalue()}


def thumbnails() -> Files:
    rng = np.random.default_rng(0)
    pictures = [picture(a, "JPEG") for a in rng.integers(0, 256, (5, 9, 8, 3), dtype=np.uint8)]
    names = np.array([f"{i}.jpg" for i in range(5)])
    offsets = np.cumsum([0, *map(len, pictures)])
    content = npz(image=names, offsets=offsets, data=np.frombuffer(b"".join(pictures), np.uint8))
    return {"thumbs64_jpeg.npz": content} | caption_table()


def image_tables(form: str) -> Files:
    ending = "/data-00000-of-00001.arrow" if form == "arrow" else "-00000-of-00001.parquet"
    files: Files = {"dataset_dict.json": b"{}"} if form == "arrow" else {}
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        cells = [{"bytes": picture(image), "path": f"{i}.png"} for i, image in enumerate(images)]
        files[f"{split}{ending}"] = image_table(cells, form)
    return files


def pen_steps(count: int) -> list[np.ndarray]:
    lines = drawn(np.random.default_rng(count).integers(12, 30, count).tolist(), seed=count)
    return [lines.steps(i) for i in range(count)]


def stroke_sets() -> Files:
    files: Files = {}
    for name, count in (("train", 4), ("valid1", 2), ("valid2", 2), ("test", 2)):
        names, texts = ([f"{word} {i}" for i in range(count)] for word in (name, "text"))
        files[f"strokes_{name}.npz"] = npz(**pack(pen_steps(count), names, texts))
    return files


def mapped_stroke_sets() -> Files:
    return {
        f"{name.removesuffix('.npz')}/{key}.npy": npy(array)
        for name, content in stroke_sets().items()
        for key, array in np.load(io.BytesIO(content)).items()
    }


def stroke_pair() -> Files:
    steps = pen_steps(20)
    lines = np.empty(len(steps), object)
    for i, line in enumerate(steps):
        lines[i] = line[:, [2, 0, 1]].astype(np.float32)
    texts = "".join(f"text of line {i}\n" for i in range(len(steps))).encode()
    return {"strokes.npy": npy(lines), "sentences.txt": texts}


def inside(pack: Callable[[bytes], bytes], ending: str, files: Callable[[], Files]) -> Any:
    """Every file compressed on its own."""
    return lambda: {f"{name}{ending}": pack(content) for name, content in files().items()}


def made(cls: type, **options: Any) -> Callable[[Path], Any]:
    return lambda root: cls(str(root), batch_size=2, **options)


_books = made(Books, val_books=1, test_books=1, vocabulary_size=20)
_mnist = made(MNIST, train_size=8, val_size=3)
_binarized = made(BinarizedMNIST, published=False, train_size=6, val_size=3)
_captions = made(CaptionedImages)
_strokes = made(IAMOnDB)
_stroke_pair = made(IAMOnDB, split="random", val_fraction=0.2, test_fraction=0.2)


def _cloze(archive: str = "") -> Callable[[Path], ClozeQA]:
    return lambda root: ClozeQA("mine", str(root / archive), batch_size=2, min_count=1)


def _converted(root: Path) -> IAMOnDB:
    convert(root, root / "converted")
    return _strokes(root / "converted")


def _sentences(root: Path) -> SentenceFile:
    return SentenceFile(str(root / "sentences.txt"), batch_size=2, eos=False)


FORMATS: dict[str, Format] = {
    "idx": Format(idx_files, _mnist),
    "idx.gz": Format(inside(gzip.compress, ".gz", idx_files), _mnist, checked=True),
    "arrow": Format(lambda: image_tables("arrow"), _mnist),
    "parquet": Format(lambda: image_tables("parquet"), _mnist),
    "amat": Format(amat, _binarized),
    "amat.gz": Format(inside(gzip.compress, ".gz", amat), _binarized, checked=True),
    "questions": Format(questions, _cloze()),
    "questions.tar": Format(lambda: {"mine.tar": packed(questions())}, _cloze("mine.tar")),
    "questions.tgz": Format(
        lambda: {"mine.tgz": packed(questions(), "gz")}, _cloze("mine.tgz"), checked=True
    ),
    "json lines": Format(json_lines, _cloze()),
    "json lines.xz": Format(inside(lzma.compress, ".xz", json_lines), _cloze(), checked=True),
    "books": Format(books, _books),
    "books.gz": Format(inside(gzip.compress, ".gz", books), _books, checked=True),
    "books.tar": Format(lambda: {"books.tar": packed(books())}, _books),
    "books.zip": Format(lambda: {"books.zip": packed(books(), "zip")}, _books),
    "captions": Format(captions, _captions),
    "karpathy": Format(karpathy, _captions),
    "matlab": Format(matlab, _captions),
    "thumbnails": Format(thumbnails, _captions),
    "caption table": Format(caption_table, _captions),
    "stroke sets": Format(stroke_sets, _strokes),
    "mapped stroke sets": Format(mapped_stroke_sets, _strokes),
    "stroke pair": Format(stroke_pair, _stroke_pair),
    "strokes xml": Format(lambda: small_distribution(2), _converted),
    "sentences": Format(
        lambda: {"sentences.txt": b"a b c\nd\ne f\n"}, _sentences, False, ("predict",)
    ),
}


@cache
def files_of(name: str) -> Files:
    return FORMATS[name].files()


@dataclass(frozen=True)
class Damage:
    """A change of the content; places are parts of its length."""

    kind: str
    place: float = 0.0
    size: int = 1
    content: bytes = b""

    def __call__(self, data: bytes) -> bytes:
        at = round(self.place * len(data))
        head, tail = data[:at], data[at:]
        if self.kind == "flip" and tail:
            return head + bytes([tail[0] ^ (1 << self.size % 8)]) + tail[1:]
        if self.kind == "cut":
            return head
        if self.kind == "drop":
            return head + tail[self.size :]
        if self.kind == "repeat":
            return head + tail[: self.size] * 2 + tail[self.size :]
        if self.kind == "insert":
            return head + self.content + tail
        if self.kind == "write":
            return head + self.content + tail[len(self.content) :]
        if self.kind == "swap":
            middle = tail[: self.size]
            return head + tail[self.size : 2 * self.size] + middle + tail[2 * self.size :]
        return self.content if self.kind == "replace" else data


#: Contents that parsers are known to dislike.
ODD = [
    b"", b"\n", b"\r\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 3000, b"9" * 5000, b"nan",
    b"-1", b"1e400", b"\t\t", b"@entity" + b"9" * 30, b"NaN,", b"<!DOCTYPE a>", b"PK\x03\x04",
    b'{"a": 1}', b"null", b"\x1f\x8b\x08", b"\x93NUMPY\x01\x00", b"\xff" * 8,
    "\u2028\u0085".encode(), b"x" * 70_000, pickle.dumps({"a": 1}),
]  # fmt: skip

_damages = st.builds(
    Damage,
    kind=st.sampled_from(["flip", "cut", "drop", "repeat", "insert", "write", "swap", "replace"]),
    place=st.floats(0, 1, width=32),
    size=st.integers(1, 600),
    content=st.one_of(st.sampled_from(ODD), st.binary(max_size=40)),
)


@dataclass(frozen=True)
class DataCase:
    """A dataset, which of its files is damaged (or removed), and how."""

    format: str
    file: int
    damages: tuple[Damage, ...]
    removed: bool = False


@st.composite
def data_cases(draw: Any) -> DataCase:
    name = draw(st.sampled_from(sorted(FORMATS)))
    return DataCase(
        name,
        draw(st.integers(0, len(files_of(name)) - 1)),
        tuple(draw(st.lists(_damages, min_size=1, max_size=3))),
        draw(st.integers(0, 30)) == 0,
    )
