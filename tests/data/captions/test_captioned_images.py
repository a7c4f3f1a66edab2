"""Captioned images: the published layouts with made-up content, batches, damaged files."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import picture, ready, real_folder
from refusals import refuses
from scipy.io import savemat
from scipy.sparse import csc_array

from ln_zoo.data import CaptionedImages
from ln_zoo.data.captions.files import caption_words
from ln_zoo.utils.vocabulary import EOS, UNK, Vocabulary

SIZES = {"train": 12, "val": 4, "test": 3}


def features(count: int, seed: int = 0, size: int = 6) -> np.ndarray:
    drawn = np.random.default_rng(seed).random((count, size), np.float32) + 0.01
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def caption(split: str, image: int, number: int) -> list[str]:
    """Of a word that only this image has, among others, so that a caption tells its image."""
    return ["a", f"{split}{image}", *(["thing"] * number)]


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """As released with order embeddings: one caption per line, arrays of one set each."""
    root = tmp_path / "coco"
    for cnn, seed in (("10crop", 0), ("1crop", 1)):
        (root / "images" / cnn).mkdir(parents=True)
        for split, count in SIZES.items():
            np.save(root / "images" / cnn / f"{split}.npy", features(count, seed))
    for split, count in SIZES.items():
        lines = [" ".join(caption(split, i, c)) for i in range(count) for c in range(5)]
        (root / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def karpathy(root: Path, **changes: Any) -> Path:
    """As Karpathy's dataset.json: splits in any order, extra captions, features by row."""
    root.mkdir(exist_ok=True)
    splits = ["train", "restval", "test", "val", "train", "val", "test"]
    images = []
    for i, split in enumerate(splits):
        words = (caption(split, i, c) for c in range(6 if i == 4 else 5))
        sentences: list[dict[str, Any]] = [{"tokens": each, "raw": "Not this ."} for each in words]
        if i == 0:
            sentences[0] = {"raw": "A tri-coloured Dog's ball ."}
        images.append({"filename": f"{i}.jpg", "split": split, "sentences": sentences})
    content = {"dataset": "coco", "images": images} | changes
    (root / "dataset_coco.json").write_text(json.dumps(content))
    np.save(root / "vgg.npy", features(len(splits)))
    return root


def table(root: Path, rows: list[list[str]] | None = None) -> Path:
    """As in the folder of Flickr8k: a table of raw captions, features of all rows."""
    root.mkdir(exist_ok=True)
    splits = ["train", "dev", "unused", "test", "train"]
    if rows is None:
        rows = [
            [f"{i}.jpg", split, *(" ".join([*caption(split, i, c), "."]).title() for c in range(5))]
            for i, split in enumerate(splits)
        ]
    header = ["image", "split", *(f"caption{i}" for i in range(5))]
    (root / "captions.tsv").write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
    np.save(root / "mobilenetv2_pool.npy", features(len(rows)).astype(np.float16))
    np.save(root / "other.npy", features(len(rows), seed=1))
    return root


def made(root: Path, **arguments: Any) -> CaptionedImages:
    return ready(CaptionedImages(str(root), **arguments))


def test_the_released_layout(released: Path) -> None:
    data = made(released)
    assert (data.name, data.test_split, data.image_features) == ("coco", "test-1k", 6)
    for split, count in SIZES.items():
        read = data.captioned(split)  # type: ignore[arg-type]
        assert read.captions == [caption(split, i, c) for i in range(count) for c in range(5)]
        np.testing.assert_array_equal(read.features, features(count))
    other = made(released, features="1crop").captioned("val")
    np.testing.assert_array_equal(other.features, features(4, 1))
    assert (data.metadata["features"], data.metadata["dataset"]) == ("10crop", "coco")
    assert isinstance(data.captioned("train").features, np.memmap)


def test_names_of_the_released_extraction_script(released: Path) -> None:
    for path in (released / "images/10crop").iterdir():
        path.rename(path.with_name(f"coco_{path.name}"))
    assert len(made(released).captioned("train")) == 12


@pytest.mark.parametrize("form", ["npy", "mat"])
def test_karpathys_layout(tmp_path: Path, form: str) -> None:
    root = karpathy(tmp_path / "k")
    if form == "mat":
        (root / "vgg.npy").unlink()
        savemat(root / "vgg_feats.mat", {"feats": features(7).T.astype(np.float64)})
    data = made(root)
    assert data.name == "coco"
    expected = {"train": [0, 1, 4], "val": [3, 5], "test": [2, 6]}
    for split, rows in expected.items():
        read = data.captioned(split)  # type: ignore[arg-type]
        np.testing.assert_allclose(read.features, features(7)[rows], rtol=1e-6)
        assert read.names == [f"{i}.jpg" for i in rows]
        assert len(read.captions) == 5 * len(rows)
    train = data.captioned("train")
    assert train.captions[0] == ["a", "tricoloured", "dogs", "ball"]
    assert train.captions[5] == caption("restval", 1, 0)
    assert train.captions[14] == caption("train", 4, 4)
    without = made(root, use_restval=False)
    assert without.captioned("train").names == ["0.jpg", "4.jpg"]
    assert "restval1" not in (without.vocabulary or ())


def test_the_table(tmp_path: Path) -> None:
    data = made(table(tmp_path / "flickr8k"))
    assert (data.name, data.test_split) == ("flickr8k", "test")
    rows = {"train": [0, 4], "val": [1], "test": [3]}
    for split, numbers in rows.items():
        read = data.captioned(split)  # type: ignore[arg-type]
        assert read.names == [f"{i}.jpg" for i in numbers]
        np.testing.assert_allclose(read.features, features(5)[numbers], rtol=1e-3)
    assert data.captioned("train").captions[7] == caption("train", 4, 2)
    assert data.metadata["features"] == "mobilenetv2_pool"
    assert data.thumbnail("0.jpg") is None
    assert made(tmp_path / "flickr8k", features="other").metadata["features"] == "other"
    assert made(tmp_path / "flickr8k", dataset="mine").name == "mine"


def test_flickr8k(data_root: Path) -> None:
    data = made(real_folder(data_root, "flickr8k"))
    sizes = {name: data.metadata[f"{name}_size"] for name in SIZES}
    assert sizes == {"train": 6000, "val": 1000, "test": 1000}
    assert (data.image_features, data.metadata["words"]) == (1280, 7630)
    read = data.captioned("train")
    assert read.captions[0][:6] == ["a", "child", "in", "a", "pink", "dress"]
    picture = data.thumbnail(read.names[0])
    assert picture is not None
    assert picture.shape == (64, 64, 3)
    assert data.thumbnail("no.jpg") is None


def test_words_of_a_raw_caption() -> None:
    assert caption_words(' "A man, a T-shirt"; two-tone!') == ["a", "man", "a", "tshirt", "twotone"]


def test_vocabulary(released: Path, tmp_path: Path) -> None:
    data = CaptionedImages(str(released))
    words = data.vocabulary
    assert words is not None
    assert words[:3] == ["thing", "a", "train0"]
    assert len(words) == 2 + 12
    both = CaptionedImages(str(released), vocabulary_from="train_val").vocabulary
    assert set(both or ()) - set(words) == {f"val{i}" for i in range(4)}
    assert CaptionedImages(str(released), min_count=6).vocabulary == ["thing", "a"]
    given = made(released, vocabulary=["a", "thing"])
    assert given.vocabulary == ["a", "thing"]
    assert given.metadata["vocabulary_from"] == "given"
    batch = given.evaluation_set("val")[torch.tensor([1])]
    assert batch.captions[2].tolist() == [2, UNK, 3, 3, EOS, EOS, EOS]
    Vocabulary(["thing", "a"]).write(tmp_path / "words.txt")
    assert made(released, vocabulary=str(tmp_path / "words.txt")).vocabulary == ["thing", "a"]
    data = CaptionedImages(str(released), min_count=999)
    refuses(r"min_count.*999", lambda: data.vocabulary)
    misread(released, "val_images.*0", val_images=0)


def images_of(batch: Any, words: Vocabulary) -> list[tuple[int, int]]:
    """Image and caption of each row, as the words say."""
    found = []
    for row, length in zip(batch.captions.tolist(), batch.lengths.tolist(), strict=True):
        assert row[length - 1 :] == [EOS] * (len(row) - length + 1)
        _, name, *things = words.words(row[: length - 1])
        found.append((int(name.removeprefix("train")), len(things)))
    return found


def test_an_epoch_has_each_image_once_with_one_caption(released: Path) -> None:
    data = made(released, batch_size=5, drop_last=False)
    words = Vocabulary(data.vocabulary or ())
    loader = data.train_dataloader()
    chosen: Counter[tuple[int, int]] = Counter()
    for epoch in range(40):
        loader.sampler.set_epoch(epoch)
        seen = []
        for batch in loader:
            pairs = images_of(batch, words)
            assert [image for image, _ in pairs] == batch.image_index.tolist()
            expected = torch.from_numpy(features(12))[batch.image_index]
            torch.testing.assert_close(batch.images, expected)
            seen += pairs
        assert sorted(image for image, _ in seen) == list(range(12))
        chosen.update(seen)
    assert len(chosen) == 60
    assert min(chosen.values()) >= 1
    by_caption = Counter(number for _, number in chosen.elements())
    assert all(60 < count < 132 for count in by_caption.values())  # 96 of 480 each


EVERY_PAIR = [(i, c) for i in range(12) for c in range(5)]


def test_all_captions_are_examples(released: Path) -> None:
    data = made(released, batch_size=7, caption_sampling="all", drop_last=False)
    words = Vocabulary(data.vocabulary or ())
    pairs = [pair for batch in data.train_dataloader() for pair in images_of(batch, words)]
    assert sorted(pairs) == EVERY_PAIR


def test_evaluation_has_all_captions_in_order(released: Path) -> None:
    data = made(released, eval_batch_size=5)
    words = Vocabulary(data.vocabulary or ())
    batches = list(data.train_eval_dataloader())
    assert [len(batch.images) for batch in batches] == [5, 5, 2]
    assert [pair for batch in batches for pair in images_of(batch, words)] == EVERY_PAIR
    assert torch.cat([batch.image_index for batch in batches]).tolist() == list(range(12))
    (first,) = data.train_eval_dataloader(examples=3)
    assert first.image_index.tolist() == [0, 1, 2]
    assert len(next(iter(data.predict_dataloader())).captions) == 15


def test_the_first_validation_images_validate(released: Path) -> None:
    assert made(released, val_images=3).captioned("val").names[-1] == "val image 2"
    assert len(made(released, val_images=None).captioned("val")) == 4


def test_features_get_unit_length(released: Path) -> None:
    path = released / "images/10crop/train.npy"
    np.save(path, 3 * features(12))
    batch = next(iter(made(released, batch_size=12).train_dataloader()))
    torch.testing.assert_close(batch.images.norm(dim=1), torch.ones(12))
    assert batch.images.dtype == torch.float32


def test_a_caption_without_words_is_its_end(released: Path) -> None:
    lines = (released / "val.txt").read_text().splitlines()
    lines[6] = ""
    (released / "val.txt").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="1 captions .* caption 1 of val"):
        data = made(released)
    batch = data.evaluation_set("val")[torch.tensor([1])]
    assert batch.lengths.tolist()[:2] == [3, 1]


def test_without_data_it_is_made_and_says_where_they_are_looked_for(monkeypatch) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    data = CaptionedImages(dataset="coco")
    assert (data.vocabulary, data.image_features, data.name) == (None, None, "coco")
    refuses(r"coco.*--data\.root", data.prepare_data, error=FileNotFoundError)


def test_the_folder_of_all_data(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_DATA", str(released.parent))
    assert len(CaptionedImages(dataset="coco").vocabulary or ()) == 14


def misread(root: Path, message: str, error: type[Exception] = ValueError, **options: Any) -> None:
    assert "\n" not in refuses(message, made, root, error=error, **options)


def test_captions_that_are_not_five_an_image(released: Path, tmp_path: Path) -> None:
    lines = (released / "train.txt").read_text().splitlines()
    (released / "train.txt").write_text("\n".join(lines[:-1]) + "\n")
    misread(released, r"train\.txt.*59.*train\.npy.*12.*60")
    rows = [["0.jpg", "train", *["A dog ."] * 5], ["1.jpg", "dev", *["A dog ."] * 4]]
    misread(table(tmp_path / "t", rows), r"captions\.tsv.*1\.jpg.*4.*5")
    misread(table(tmp_path / "u", rows[:1]), "val set")
    few = [{"filename": "x.jpg", "split": "val", "sentences": [{"tokens": ["a"]}] * 4}]
    root = karpathy(tmp_path / "k", images=few)
    np.save(root / "vgg.npy", features(1))
    misread(root, r"dataset_coco\.json.*x\.jpg.*4.*5")


def test_captions_and_features_of_different_sets(released: Path, tmp_path: Path) -> None:
    np.save(released / "images/10crop/val.npy", features(5))
    misread(released, r"val\.txt.*20.*val\.npy.*5")
    root = table(tmp_path / "t")
    np.save(root / "mobilenetv2_pool.npy", features(6))
    misread(root, r"mobilenetv2_pool\.npy.*6.*captions\.tsv.*5")
    root = karpathy(tmp_path / "k")
    np.save(root / "vgg.npy", features(8))
    misread(root, r"vgg\.npy.*8.*dataset_coco\.json.*7")
    np.save(released / "images/10crop/val.npy", features(4, size=5))
    misread(released, "5, 6 features")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, 0])
def test_features_that_are_not_finite_in_float32_or_zeros(released: Path, value: float) -> None:
    array = features(4).astype(np.float64)
    array[2] *= 0
    array[2, 3] = value
    np.save(released / "images/10crop/val.npy", array)
    wrong = "finite" if value else "zeros"
    misread(released, rf"val.npy, val set: image 2 \(val image 2\).*{wrong}")


def test_features_of_another_kind(released: Path) -> None:
    path = released / "images/10crop/val.npy"
    for array, message in (
        (np.ones((4, 6), np.int64), "val.npy, val set.*int64"),
        (np.ones((4, 2, 3), np.float32), r"val\.npy.*\(4, 2, 3\)"),
        (np.array([{}] * 4), r"val\.npy"),
    ):
        np.save(path, array, allow_pickle=True)
        misread(released, message)
    np.save(path, features(4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    misread(released, r"val\.npy")
    for position in range(6, 128, 5):  # NumPy evaluates the header
        damaged = bytearray(whole)
        damaged[position] ^= 8
        path.write_bytes(damaged)
        with contextlib.suppress(pytest.fail.Exception):  # blanks of the header
            misread(released, r"val\.npy|val set")


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_pipes_are_refused_at_once(released: Path, tmp_path: Path) -> None:
    for root, name in (
        (released, "images/10crop/val.npy"),
        (table(tmp_path / "t"), "mobilenetv2_pool.npy"),
        (karpathy(tmp_path / "k"), "dataset_coco.json"),
    ):
        (root / name).unlink()
        os.mkfifo(root / name)
        with pytest.raises((ValueError, FileNotFoundError), match=Path(name).stem):
            made(root)


def test_files_that_are_missing(released: Path, tmp_path: Path) -> None:
    misread(released, "2crop.*10crop, 1crop", FileNotFoundError, features="2crop")
    (released / "images/10crop/test.npy").unlink()
    misread(released, r"10crop.*test\.npy", FileNotFoundError)
    (released / "val.txt").unlink()
    misread(released, r"val\.txt", FileNotFoundError)
    misread(tmp_path / "nowhere", "nowhere", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    misread(tmp_path / "empty", "empty.*nothing")
    misread(released / "train.txt", r"train\.txt", NotADirectoryError)
    root = karpathy(tmp_path / "k")
    np.save(root / "resnet.npy", features(7))
    misread(root, "resnet, vgg.*--data.features", FileNotFoundError)
    assert made(root, features="vgg").metadata["features"] == "vgg"
    (root / "dataset.json").write_text("{}")
    misread(root, r"dataset\.json, dataset_coco\.json", features="vgg")


@pytest.mark.parametrize(
    ("content", "mentioned"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "images"),
        ('{"images": [{"split": "val"}]}', "image 0.*sentences"),
        ('{"images": [{"split": "val", "sentences": [{"raw": 3}]}]}', "image 0"),
        ('{"images": [{"split": "val", "sentences": [{}]}]}', "image 0.*raw"),
        ('{"images": [{"split": ["train"], "sentences": []}]}', "image 0.*split.*list"),
        (
            '{"images": [{"split": "val", "sentences": [{"tokens": "a b"}]}]}',
            "image 0.*tokens.*str",
        ),
    ],
    ids=["cut", "nested", "list", "none", "number", "empty", "split", "tokens"],
)
def test_a_damaged_json(tmp_path: Path, content: str, mentioned: str) -> None:
    root = karpathy(tmp_path / "k")
    (root / "dataset_coco.json").write_text(content)
    np.save(root / "vgg.npy", features(1))
    misread(root, f"dataset_coco.json.*{mentioned}")


def test_texts_are_utf8_with_lines_of_some_length(released: Path, tmp_path: Path) -> None:
    (released / "val.txt").write_bytes(b"caf\xe9\n" * 20)
    misread(released, r"val\.txt.*byte 3")
    root = table(tmp_path / "t")
    (root / "captions.tsv").write_bytes(b"x" * 12_000_000)
    misread(root, r"captions\.tsv.{,200}$")


JPEG = picture(np.arange(192, dtype=np.uint8).reshape(8, 8, 3), "JPEG")


def thumbnails(root: Path, content: bytes = JPEG, **changes: Any) -> CaptionedImages:
    """A table with thumbnails of all images; returns its data."""
    names = [f"{i}.jpg" for i in range(5)]
    contents = [JPEG, content, JPEG, JPEG, JPEG]
    arrays = {
        "image": np.array(names),
        "offsets": np.cumsum([0, *map(len, contents)]),
        "data": np.frombuffer(b"".join(contents), np.uint8),
    }
    np.savez(table(root) / "thumbs64_jpeg.npz", **(arrays | changes))
    return made(root)


def test_thumbnails(tmp_path: Path) -> None:
    data = thumbnails(tmp_path, picture(np.full((8, 8), 200, np.uint8), "JPEG"))
    first, grey = data.thumbnail("0.jpg"), data.thumbnail("1.jpg")
    assert first is not None
    assert (first.shape, first.dtype) == ((8, 8, 3), np.uint8)
    np.testing.assert_array_equal(grey, np.full((8, 8, 3), 200))
    assert data.thumbnail("5.jpg") is None


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n",
        picture(np.zeros((8, 8), np.uint8)),
        picture(np.zeros((5000, 5001), np.uint8), "JPEG")[:700],
        JPEG[:-40],
        b"",
        b"/etc/hostname",
    ],
    ids=["EPS", "PNG", "huge", "cut", "empty", "path"],
)
def test_thumbnails_that_are_no_jpeg(tmp_path: Path, content: bytes) -> None:
    data = thumbnails(tmp_path, content)
    assert data.thumbnail("0.jpg") is not None
    refuses(r"^\S*thumbs64_jpeg.npz, image 1 .*JPEG[^\n]*$", data.thumbnail, "1.jpg")


@pytest.mark.parametrize(
    ("changes", "mentioned"),
    [
        ({"offsets": np.arange(3)}, "offsets.* 0 to 2"),
        ({"offsets": np.zeros(6)}, "offsets.*float64"),
        ({"offsets": np.array(3)}, r"offsets.*int64 \(\)"),
        ({"offsets": np.array([0, len(JPEG) * 5])}, r"offsets of 1 .*names \(5,\)"),
        ({"image": np.array("0.jpg")}, r"names \(\)"),
        ({"data": np.zeros(5 * len(JPEG))}, "data float64"),
    ],
)
def test_contradictions_in_thumbnails(tmp_path: Path, changes: Any, mentioned: str) -> None:
    data = thumbnails(tmp_path, **changes)
    refuses(rf"thumbs64_jpeg\.npz.*{mentioned}", data.thumbnail, "0.jpg")


MATLAB_7_3 = b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n" + bytes(900)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "sparse", "7.3", "HDF5", "nothing"])
def test_a_damaged_mat(tmp_path: Path, damage: str) -> None:
    root = karpathy(tmp_path / "k")
    (root / "vgg.npy").unlink()
    path = root / "vgg_feats.mat"
    arrays = {} if damage == "nothing" else {"feats": features(7).T}
    savemat(path, {"feats": csc_array(features(7).T)} if damage == "sparse" else arrays)
    whole = path.read_bytes()
    contents = {"cut": whole[:-40], "empty": b"", "other": b"x" * 900}
    contents |= {"7.3": MATLAB_7_3, "HDF5": MATLAB_7_3[512:]}
    path.write_bytes(contents.get(damage, whole))
    more = {"sparse": "dense", "7.3": "7.3.*-v7", "HDF5": "7.3.*-v7"}.get(damage, "")
    misread(root, rf"vgg_feats\.mat.*{more}")


def test_features_of_a_mat_are_found_among_others(tmp_path: Path) -> None:
    root = karpathy(tmp_path / "k")
    (root / "vgg.npy").unlink()
    savemat(root / "vgg_feats.mat", {"a": np.ones((2, 2)), "feats": features(7).T})
    np.testing.assert_array_equal(made(root).captioned("test").features, features(7)[[2, 6]])
