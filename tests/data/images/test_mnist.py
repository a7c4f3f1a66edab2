"""MNIST: the real data, and its sources on a small synthetic set of the same forms."""

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_support import idx, image_table, picture, ready
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import Image as Picture
from refusals import refuses

from ln_zoo.data import MNIST, Digits

SIZES = {"train": 30, "test": 12}
SMALL = {"train_size": 20, "val_size": 10}
PREFIX = {"train": "train", "test": "t10k"}


def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SIZES[split])
    images = rng.integers(0, 256, (SIZES[split], 28, 28), dtype=np.uint8)
    return images, np.arange(SIZES[split], dtype=np.uint8) % 10


@pytest.fixture
def idx_folder(tmp_path) -> Path:
    folder = tmp_path / "idx"
    folder.mkdir()
    for split, prefix in PREFIX.items():
        images, labels = arrays(split)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def dataset(to_images, image: object) -> DatasetDict:
    features = Features(image=image, label=ClassLabel(num_classes=10))
    splits = {}
    for split in SIZES:
        images, labels = arrays(split)
        columns = {"image": to_images(images), "label": labels.tolist()}
        splits[split] = Dataset.from_dict(columns, features=features)
    return DatasetDict(splits)


def pictures(mode: str = "L") -> DatasetDict:
    def drawn(images: np.ndarray) -> list:
        return [Picture.fromarray(image).convert(mode) for image in images]

    return dataset(drawn, Image())


def write_parquet(folder: Path, dataset: DatasetDict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in dataset.items():
        for shard in range(2):
            file = folder / f"{split}-0000{shard}-of-00002.parquet"
            part.shard(2, shard, contiguous=True).to_parquet(file)
    return folder


def check_small(root: Path | None, **options) -> None:
    data = MNIST(None if root is None else str(root), **SMALL, **options)
    data.prepare_data()
    sets = data.read()
    images, labels = arrays("train")
    train, val = (images[:20], labels[:20]), (images[20:], labels[20:])
    expected = {"train": train, "val": val, "test": arrays("test")}
    for name, (pixels, classes) in expected.items():
        found, named = sets[name]
        assert (found.dtype, named.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(found.numpy(), pixels[:, None])
        assert np.array_equal(named.numpy(), classes)


def test_the_real_data(data_root):
    data = ready(MNIST(str(data_root / "mnist")))
    assert data.metadata["dataset"] == "mnist"
    loaders = [data.train_eval_dataloader(), data.val_dataloader(), data.test_dataloader()]
    train, val, test = (
        tuple(torch.cat(parts) for parts in zip(*loader, strict=True)) for loader in loaders
    )
    assert [len(labels) for _, labels in (train, val, test)] == [55_000, 5_000, 10_000]
    assert train[1][:5].tolist() == [5, 0, 4, 1, 9]
    assert test[1][:5].tolist() == [7, 2, 1, 0, 4]
    both = torch.cat([train[0], val[0]])
    assert both.shape == (60_000, 1, 28, 28)
    assert both.double().mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert both.double().std().item() == pytest.approx(0.3081, abs=5e-5)
    assert (both.min(), both.max()) == (0, 1)
    assert torch.cat([train[1], val[1]]).bincount().tolist() == [
        *(5923, 6742, 5958, 6131, 5842),
        *(5421, 5918, 6265, 5851, 5949),
    ]
    other = MNIST(str(data_root / "mnist"), train_size=50_000, val_size=10_000).read()
    assert len(other["train"][1]) == 50_000
    assert torch.equal(other["val"][1][-5_000:], val[1])
    assert torch.equal(other["train"][1], train[1][:50_000])


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_files(idx_folder, mark, suffix):
    for file in list(idx_folder.iterdir()):
        content = file.read_bytes()
        file.unlink()
        renamed = idx_folder / (file.name.replace("-idx", f"{mark}idx") + suffix)
        renamed.write_bytes(gzip.compress(content) if suffix else content)
    check_small(idx_folder)


def test_a_file_is_unpacked_by_content_not_by_name(idx_folder):
    for file in list(idx_folder.iterdir()):
        file.rename(file.with_name(file.name + ".gz"))
    check_small(idx_folder)


@pytest.mark.parametrize("form", ["arrays", "pictures"])
def test_saved_to_disk_and_parquet(tmp_path, form):
    saved = pictures() if form == "pictures" else dataset(list, Array2D((28, 28), "uint8"))
    saved.save_to_disk(tmp_path / "arrow")
    write_parquet(tmp_path / "hub" / "mnist", saved)
    for folder in ("arrow", "hub", "hub/mnist"):
        check_small(tmp_path / folder)


def test_a_folder_named_by_the_environment_is_found(idx_folder, monkeypatch):
    idx_folder.rename(idx_folder.parent / "mnist")
    monkeypatch.setenv("LN_ZOO_DATA", str(idx_folder.parent))
    check_small(None)


def test_the_hub_id_is_used_without_a_local_copy(tmp_path, monkeypatch):
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    asked = []
    files = {
        split: str(write_parquet(tmp_path / "hub", pictures()) / f"{split}-*.parquet")
        for split in SIZES
    }

    def load(repo_id: str) -> DatasetDict:
        asked.append(repo_id)
        return load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr("datasets.load_dataset", load)
    check_small(None, repo_id="someone/digits")
    assert set(asked) == {"someone/digits"}
    monkeypatch.setattr("datasets.load_dataset", lambda _: DatasetDict(train=pictures()["train"]))
    refuses(r"MNIST.* \['train'\].*'test'", MNIST(repo_id="MNIST", **SMALL).setup)
    unwritten = dataset(lambda images: ["no.png"] * len(images), Image())
    monkeypatch.setattr("datasets.load_dataset", lambda _: unwritten)
    refuses("train set of MNIST, row 0.*no bytes", MNIST(repo_id="MNIST", **SMALL).setup)


@pytest.mark.slow
def test_offline_without_a_cache_asks_for_a_local_copy(tmp_path):
    code = "from ln_zoo.data import MNIST; MNIST().prepare_data()"
    repository = Path(__file__).parents[3]
    environment = {k: v for k, v in os.environ.items() if k != "LN_ZOO_DATA"}
    path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ConnectionError: dataset 'ylecun/mnist' is not in the cache")
    assert "--data.root" in last


def cut(file: str, length: int):
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_bytes(path.read_bytes()[:length])

    return damage


def write(file: str, content: bytes):
    return lambda folder: (folder / file).write_bytes(content)


IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("damage", "mentioned"),
    [
        (cut(IMAGES, 5000), f"{IMAGES}.*4,984.*23,520"),
        (cut(LABELS, 30), f"{LABELS}.*22"),
        (cut(IMAGES, 10), IMAGES),
        (cut(IMAGES, 0), IMAGES),
        (write(IMAGES, gzip.compress(idx(arrays("train")[0]))[:9000]), IMAGES),
        (write(IMAGES, b"<!DOCTYPE html><html></html>"), f"{IMAGES}.*3c 21 44 4f.*00 00 08 03"),
        (write(IMAGES, idx(arrays("train")[1])), f"{IMAGES}.*00 00 08 01.*00 00 08 03"),
        (write(LABELS, idx(np.zeros(29, np.uint8))), f"{IMAGES}.*30.*{LABELS}.*29"),
        (write(LABELS, idx(np.full(30, 11, np.uint8))), r"train.*11"),
        (write(IMAGES, idx(np.zeros((30, 20, 28), np.uint8))), r"\(20, 28\).*\(28, 28\)"),
        (write(IMAGES, idx(np.zeros((0, 28, 28), np.uint8))), "0 x 28 x 28"),
        (write(IMAGES, idx(arrays("train")[0]) + b"more"), f"{IMAGES}.*23,524"),
    ],
)
def test_damaged_idx_files_are_refused(idx_folder, damage, mentioned):
    damage(idx_folder)
    refuses(f"(?s){mentioned}", MNIST(str(idx_folder), **SMALL).setup)


def test_folders_that_are_no_dataset_are_refused(tmp_path, idx_folder):
    (idx_folder / LABELS).unlink()
    refuses(LABELS, MNIST, str(idx_folder), error=FileNotFoundError)
    refuses("absent", MNIST, str(tmp_path / "absent"), error=FileNotFoundError)
    (tmp_path / "notes.txt").write_text("nothing")
    refuses(r"notes\.txt", MNIST, str(tmp_path / "notes.txt"), error=NotADirectoryError)
    refuses(r"(?s)train-images-idx3-ubyte.*notes\.txt", MNIST, str(tmp_path))


def test_incomplete_copies_are_refused(tmp_path):
    folder = tmp_path / "arrow"
    pictures().save_to_disk(folder, num_shards={"train": 2, "test": 1})
    check_small(folder)
    (folder / "train/data-00000-of-00002.arrow").unlink()
    refuses(r"arrow.* 1 .*train.* 2", MNIST, str(folder), **SMALL, error=FileNotFoundError)
    shutil.rmtree(folder / "train")
    refuses(r"arrow.* 0 .*train", MNIST, str(folder), **SMALL, error=FileNotFoundError)

    folder = write_parquet(tmp_path / "parquet", pictures())
    (folder / "test-00001-of-00002.parquet").unlink()
    refuses(r"parquet.* 1 .*test.* 2", MNIST, str(folder), **SMALL, error=FileNotFoundError)
    (folder / "test-00000-of-00002.parquet").unlink()
    refuses(r"parquet.* 0 .*test", MNIST, str(folder), **SMALL, error=FileNotFoundError)


def test_two_parquet_datasets_are_not_mixed(tmp_path):
    for name in ("mnist", "fashion"):
        write_parquet(tmp_path / name, pictures())
    refuses(r"fashion, .*mnist", MNIST, str(tmp_path), **SMALL)


def changed(data: DatasetDict, column: str, values) -> DatasetDict:
    return data.remove_columns(column).map(values, with_indices=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.rename_column("image", "picture"), r"\['label', 'picture'\]|\['picture', 'l"),
        (lambda d: d.remove_columns("label"), r"columns \['image'\]"),
        (lambda d: pictures("RGB"), r"row 0.*RGB.*grey"),
        (lambda d: d.map(lambda _, i: {"label": [0.5, None][i % 2]}, with_indices=True), "label"),
        (lambda d: changed(d, "label", lambda _, i: {"label": i / 2}), "labels.*double"),
        (lambda d: changed(d, "image", lambda _, i: {"image": [1, 2]}), "list.*int64.*grey"),
        (lambda d: dataset(list, Array2D((28, 28), "int32")), "list.*int32.*grey"),
    ],
)
def test_copies_of_another_form_are_refused(tmp_path, change, message):
    change(pictures()).save_to_disk(tmp_path / "copy")
    refuses(f"copy.*{message}", MNIST(str(tmp_path / "copy"), **SMALL).setup)


def tables(folder: Path, form: str, cells: list) -> Path:
    """Tables of images for both splits; returns the path of the training set."""
    if form == "arrow":
        folder.mkdir()
        (folder / "dataset_dict.json").write_text("null")  # what it holds is not needed
    ending = "/data.arrow" if form == "arrow" else ".parquet"
    paths = [folder / f"{split}{ending}" for split in SIZES]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_table(cells, form))
    return paths[0]


GREY = arrays("train")[0]
CELLS = [{"bytes": picture(image), "path": f"{i}.png"} for i, image in enumerate(GREY)]
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n"
PNG = CELLS[0]["bytes"]
HUGE = picture(np.zeros((5000, 5001), np.uint8))[:60]


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("cell", "mentioned"),
    [
        ({"bytes": None, "path": "http://127.0.0.1:9/steal.png"}, "no bytes"),
        ({"bytes": None, "path": "local.png"}, "no bytes"),
        (None, "no bytes"),
        ({"bytes": b"local.png", "path": None}, "PNG or JPEG"),
        ({"bytes": EPS, "path": "28.png"}, "PNG or JPEG"),
        ({"bytes": picture(GREY[0], "BMP"), "path": None}, "PNG or JPEG"),
        ({"bytes": HUGE, "path": None}, "5001, 5000.*25,000,000"),
        ({"bytes": PNG[:-30] + b"?" + PNG[-29:], "path": None}, "PNG or JPEG"),
        ({"bytes": PNG[:-20], "path": None}, "PNG or JPEG"),
        ({"bytes": picture(GREY[0][:20]), "path": None}, r"train set.* 9 .*\(20, 28\).*\(28, 28\)"),
    ],
    ids=["URL", "path", "null", "name", "EPS", "BMP", "huge", "flipped", "cut", "size"],
)
@pytest.mark.filterwarnings("error")
def test_pictures_are_decoded_from_bytes_of_two_formats(
    tmp_path, monkeypatch, form, cell, mentioned
):
    """A path or URL is not followed, and no program is run, as PIL does for EPS."""
    monkeypatch.chdir(tmp_path)
    Path("local.png").write_bytes(PNG)
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    asked = []
    monkeypatch.setattr("socket.socket.connect", lambda _, address: asked.append(address))
    path = tables(tmp_path / "x", form, [*CELLS[:9], cell, *CELLS[10:]])
    message = refuses(f"(?s){mentioned}", MNIST(str(tmp_path / "x"), **SMALL).setup)
    assert "\n" not in message
    assert f"{path}, row 9" in message or "train set" in mentioned
    assert not asked
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_damaged_tables_are_named_in_one_line(tmp_path, form):
    path = tables(tmp_path / "x", form, CELLS)
    MNIST(str(tmp_path / "x"), **SMALL).setup()
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-9], b"x" * 100, b"PAR1" * 9, bytes(64)):
        path.write_bytes(content)
        message = refuses("x", MNIST(str(tmp_path / "x"), **SMALL).setup)
        assert str(path) in message
        assert "\n" not in message
    path.write_bytes(image_table([], form))
    refuses("train set.*no images", MNIST(str(tmp_path / "x"), **SMALL).setup)
    path.unlink()
    os.mkfifo(path)
    refuses(str(path), MNIST(str(tmp_path / "x"), **SMALL).setup)


def test_splits_larger_than_the_source_are_refused(idx_folder):
    refuses("exceed the 30 images", MNIST(str(idx_folder), train_size=21, val_size=10).setup)


def test_metadata_are_plain_data(idx_folder):
    data = MNIST(str(idx_folder), batch_size=4, seed=7, eval_batch_size=50, **SMALL)
    assert data.metadata["test_size"] == 10_000
    data.setup()
    sizes = {"train_size": 20, "val_size": 10, "test_size": 12}
    loading = {"batch_size": 4, "eval_batch_size": 50, "drop_last": False, "seed": 7}
    # Noise is not to be compared with numbers that are reported of MNIST.
    assert data.metadata == {"dataset": "mnist-unpublished"} | sizes | loading
    assert data.preprocessing == {"scale": 255, "image_shape": [1, 28, 28]}
    assert (data.in_features, data.num_classes) == (784, 10)
    assert data.image_shape == (1, 28, 28)


def test_the_checksum_is_that_of_names_and_contents(idx_folder, tmp_path):
    def checksum(root: Path) -> str | None:
        return MNIST(str(root), **SMALL).checksum()

    first = checksum(idx_folder)
    copy = tmp_path / "copy/idx"
    shutil.copytree(idx_folder, copy)
    (copy / ".cache").mkdir()
    (copy / ".cache/parsed").touch()
    assert checksum(copy) == first
    labels = copy / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\7")
    assert checksum(copy) not in (first, None)
    assert Digits().checksum() is None
