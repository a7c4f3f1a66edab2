"""Binarized MNIST: the real files, small ones of the same form, and the other binarizations."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from data_support import SETS, idx, in_order, real_folder
from data_support import ready as read_in
from refusals import refuses

from ln_zoo.data import MNIST, BinarizedMNIST
from ln_zoo.data.images import binarized

ROWS = {"train": 30, "valid": 12, "test": 20}
SMALL = {"train_size": 30, "val_size": 12, "published": False}
GREY = {"train_size": 20, "val_size": 10}
WORDS = {"train": "train", "val": "valid", "test": "test"}
#: Of the published files: images, ones, their share, and the digest of the text.
PUBLISHED = {
    "train": (50_000, 5_118_041, 0.13056,
              "ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d"),
    "val": (10_000, 1_028_036, 0.13113,
            "1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2"),
    "test": (10_000, 1_038_896, 0.13251,
             "e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c"),
}  # fmt: skip


def pixels(word: str, columns: int = 784) -> np.ndarray:
    """The images of a small file, uint8 (N, columns)."""
    rng = np.random.default_rng(ROWS[word])
    return rng.integers(0, 2, (ROWS[word], columns), dtype=np.uint8)


def text(matrix: np.ndarray, between: bytes = b" ", end: bytes = b"\n") -> bytes:
    rows = ((row + ord("0")).astype(np.uint8).tobytes().decode() for row in matrix)
    return b"".join(between.decode().join(row).encode() + end for row in rows)


def write_files(
    folder: Path,
    matrices: Mapping[str, np.ndarray] | None = None,
    packed: bool = False,
    **options: bytes,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for word in ROWS:
        content = text(pixels(word) if matrices is None else matrices[word], **options)
        name = f"binarized_mnist_{word}.amat{'.gz' if packed else ''}"
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "binarized_mnist")


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A small MNIST: 30 and 12 images that hold every grey level."""
    root = tmp_path / "mnist"
    root.mkdir()
    for name, number in (("train", 30), ("t10k", 12)):
        images = np.random.default_rng(number).integers(0, 256, (number, 28, 28), dtype=np.uint8)
        images[:, :8] = np.arange(224).reshape(8, 28) + 32
        (root / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (root / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.zeros(number, np.uint8)))
    return root


def ready(root: Path | None, **options) -> BinarizedMNIST:
    return read_in(BinarizedMNIST(None if root is None else str(root), **options))


def join(loader) -> torch.Tensor:
    for batch in (batches := list(loader)):
        (images,) = batch
        assert isinstance(batch, tuple | list)
        assert images.dtype == torch.float32
        assert images.shape[1:] == (1, 28, 28)
    return torch.cat([images for (images,) in batches])


def rows_of(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


@pytest.fixture(scope="module")
def real(data_root: Path) -> Path:
    return real_folder(data_root, "binarized_mnist")


def test_the_real_files(real: Path) -> None:
    data = ready(real)
    for name, (size, ones, share, digest) in PUBLISHED.items():
        images = in_order(data, name)
        assert images.shape == (size, 1, 28, 28)
        assert ((images == 0) | (images == 1)).all()
        assert images.sum(dtype=torch.float64).item() == ones
        assert images.mean(dtype=torch.float64).item() == pytest.approx(share, abs=5e-6)
        # Made text again, they have the digest of the published text.
        lines = np.full((size, 784, 2), ord(" "), np.uint8)
        lines[:, :, 0] = images.reshape(size, 784).numpy() + ord("0")
        lines[:, -1, 1] = ord("\n")
        assert hashlib.sha256(lines.tobytes()).hexdigest() == digest
    # The file is sorted by digit: zeros, hollow in the middle, come first, but not in tests.
    middle = (slice(None), 0, slice(12, 16), slice(12, 16))
    assert in_order(data, "test")[:500][middle].mean() < 0.1
    assert 0.3 < next(iter(data.test_dataloader()))[0][:500][middle].mean() < 0.5
    assert data.metadata["dataset"] == "binarized_mnist"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", [b"\n", b" \r\n"])
def test_the_sets_are_those_of_the_files(tmp_path: Path, packed: bool, end: bytes) -> None:
    data = ready(write_files(tmp_path / "it", packed=packed, end=end), **SMALL)
    for name, word in WORDS.items():
        expected = pixels(word).reshape(-1, 1, 28, 28)
        assert np.array_equal(in_order(data, name).numpy(), expected)
    assert data.in_features == 784
    assert data.image_shape == (1, 28, 28)


def test_a_smaller_set_is_the_beginning_of_the_file(folder: Path) -> None:
    data = ready(folder, train_size=7, val_size=3, published=False)
    assert np.array_equal(in_order(data, "train").reshape(7, 784).numpy(), pixels("train")[:7])
    assert np.array_equal(in_order(data, "val").reshape(3, 784).numpy(), pixels("valid")[:3])
    assert len(in_order(data, "test")) == data.metadata["test_size"] == 20
    assert len(join(data.train_dataloader())) == 7
    refuses("val_size 13 exceeds the 12 images", ready, folder, **SMALL | {"val_size": 13})


def test_a_folder_named_by_the_environment_is_found(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("LN_ZOO_DATA", str(folder.parent))
    assert len(in_order(ready(None, **SMALL), "train")) == 30


def sorted_files(folder: Path) -> Path:
    """A thousand test images of ten kinds, sorted: kind k begins with k ones."""
    kinds = np.repeat(np.arange(10), 100)
    test = (np.arange(784) < kinds[:, None]).astype(np.uint8)
    valid = np.concatenate([test, test[:1]])
    return write_files(folder, {"train": test[::10], "valid": valid, "test": test})


def kinds_of(images: torch.Tensor) -> list[int]:
    return images.sum((1, 2, 3)).int().bincount(minlength=10).tolist()


def test_part_of_a_sorted_set_is_spread_over_it(tmp_path: Path) -> None:
    root = sorted_files(tmp_path / "it")
    data = ready(root, train_size=100, val_size=1001, published=False, eval_batch_size=50)
    for first, (images,) in enumerate(data.test_dataloader()):
        assert min(kinds_of(images)) >= 3, first
        assert max(kinds_of(images)) <= 7, first
    for examples in (10, 20, 100, 500):
        (images,) = next(iter(data.val_eval_dataloader(examples, examples=examples)))
        assert len(images) == examples
        assert max(kinds_of(images)) - min(kinds_of(images)) <= 1
    assert kinds_of(join(data.train_eval_dataloader(examples=30))) == [3] * 10
    assert len(join(data.val_eval_dataloader(examples=5000))) == 1001


def test_damaged_files_are_named(folder: Path) -> None:
    path = folder / "binarized_mnist_valid.amat"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    packed = gzip.compress(whole)
    damages = {
        "783 at row 5": [*lines[:4], lines[4][2:], *lines[5:]],
        "1 at row 12": [*lines[:11], lines[11][:1]],
        "up to 7.*0 or 1": [*lines[:2], lines[2][:-2] + b"7\n"],
        "'x'.*row 2": [*lines[:2], lines[2][:-2] + b"x\n"],
        "64 values.*784": [b" ".join([b"0"] * 64) + b"\n" for _ in lines],
        "cannot be read": [packed[:500]],
        "cannot be": [packed[:-6] + b"\0" + packed[-5:]],
        "values": [],
    }
    for mentioned, damaged in damages.items():
        path.write_bytes(b"".join(damaged))
        data = BinarizedMNIST(str(folder), **SMALL)
        refuses(rf"binarized_mnist_valid\.amat .*{mentioned}", data.setup)
    path.write_bytes(whole)
    ready(folder, **SMALL)


def test_a_compressed_file_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ln_zoo.data.images.files._MAX_BYTES", 1000)
    refuses(r"binarized_mnist_train\.amat.*1,000 bytes", BinarizedMNIST(str(folder), **SMALL).setup)


def test_missing_files_are_told_when_they_are_needed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    where = "larocheh.*--data.root .*LN_ZOO_DATA"
    file = tmp_path / "file"
    file.write_text("")
    (folder / "binarized_mnist_test.amat").unlink()
    examples = [
        (None, FileNotFoundError, where),
        (tmp_path / "absent", FileNotFoundError, f"absent.*{where}"),
        (file, NotADirectoryError, "file"),
        (folder, FileNotFoundError, f"binarized_mnist_test.amat.*{where}"),
        (folder.parent, FileNotFoundError, f"train.amat, .*test.amat.*{where}"),
    ]
    for root, error, message in examples:
        data = BinarizedMNIST(None if root is None else str(root))
        for go in (data.prepare_data, data.setup):
            refuses(message, go, error=error)
    for binarization in ("dynamic", "threshold", "grey"):
        data = BinarizedMNIST(str(tmp_path / "absent"), binarization)
        refuses("absent", data.prepare_data, error=FileNotFoundError)
    refuses("train-images", ready, folder, binarization="grey")


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ({"train_size": 50_001}, "train_size.*50,001.*50,000"),
        ({"val_size": 10_001}, "val_size.*10,001.*10,000"),
        ({"binarization": "grey", "train_size": 50_001}, "60,001.*60,000.*binarized_mnist-grey"),
    ],
)
def test_arguments_are_checked_at_construction(options: dict, mentioned: str) -> None:
    refuses(mentioned, BinarizedMNIST, **options)


@pytest.fixture
def as_if_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in WORDS.items():
        images = pixels(word)
        facts = binarized._Published(
            word,
            len(images),
            hashlib.sha256(np.packbits(images, axis=1).tobytes()).hexdigest(),
        )
        monkeypatch.setitem(binarized._PUBLISHED, name, facts)


@pytest.mark.usefixtures("as_if_published")
@pytest.mark.parametrize("packed", [False, True])
def test_other_images_are_refused_unless_meant(tmp_path: Path, packed: bool) -> None:
    sizes = {"train_size": 25, "val_size": 12}
    data = ready(write_files(tmp_path / "it", packed=packed), **sizes)
    assert data.metadata["dataset"] == "binarized_mnist"
    assert data.metadata["published"] is True
    images = pixels("test")
    flipped = images.copy()
    flipped[3, 100] ^= 1
    for test in (images[:19], images.repeat(2, 0), flipped, images[::-1]):
        matrices = {word: pixels(word) for word in ROWS} | {"test": test}
        root = write_files(tmp_path / "it", matrices, packed=packed)
        refuses(rf"test\.amat.* {len(test)} .*published", ready, root, **sizes)
        data = ready(root, published=False, **sizes)
        assert len(in_order(data, "test")) == len(test)
        assert data.metadata["dataset"] == "binarized_mnist-unpublished"


@pytest.mark.parametrize("binarization", ["fixed", "dynamic", "threshold", "grey"])
def test_no_two_binarizations_go_by_one_name(binarization: str) -> None:
    data = BinarizedMNIST(binarization=binarization)
    fixed, facts = binarization == "fixed", data.metadata
    assert facts["dataset"] == "binarized_mnist" + ("" if fixed else f"-{binarization}")
    sizes = [facts[f"{name}_size"] for name in SETS]
    assert (facts["binarization"], sizes) == (binarization, [50_000, 10_000, 10_000])
    # Only where images are drawn here do they depend on the seed of the draws.
    assert ("binarization_seed" in facts) == (binarization == "dynamic")
    form = {"binarization": binarization, "image_shape": [1, 28, 28]}
    assert data.preprocessing == form | ({} if fixed else {"scale": 255})


def grey_of(root: Path, name: str) -> torch.Tensor:
    return MNIST(str(root), **GREY).read()[name][0]


@pytest.mark.parametrize("name", SETS)
def test_grey_and_threshold(mnist: Path, name: str) -> None:
    levels = grey_of(mnist, name)
    grey = in_order(ready(mnist, binarization="grey", **GREY), name)
    assert torch.equal(grey, levels.float() / 255)
    data = ready(mnist, binarization="threshold", **GREY)
    assert data.metadata["dataset"] == "binarized_mnist-threshold-unpublished"
    assert torch.equal(in_order(data, name), (levels >= 128).float())
    assert {127, 128} <= set(levels.flatten().tolist())


def test_dynamic_draws_have_the_grey_levels_as_means(mnist: Path) -> None:
    data = ready(mnist, binarization="dynamic", **GREY)
    levels = grey_of(mnist, "train").double() / 255
    epochs = 400
    every = torch.arange(20)
    mean = torch.stack([data.training_set()[every, n][0] for n in range(epochs)]).double().mean(0)
    certain = (levels == 0) | (levels == 1)
    assert certain.any()
    assert torch.equal(mean[certain], levels[certain])
    z = (mean - levels)[~certain] / (levels * (1 - levels) / epochs).sqrt()[~certain]
    assert z.abs().max() < 6
    assert abs(z.mean()) < 4 / z.numel() ** 0.5
    assert z.var().item() == pytest.approx(1, abs=5 * (2 / z.numel()) ** 0.5)
    # Pixels, images, epochs and sets go their own ways.
    once = (data.training_set()[every, 1][0].double() - levels)[:, :, 8:].flatten(1)
    across = torch.corrcoef(once)[~torch.eye(20, dtype=torch.bool)]
    assert across.abs().max() < 5 / once.shape[1] ** 0.5
    again = (data.training_set()[every, 2][0].double() - levels)[:, :, 8:].flatten()
    between = torch.corrcoef(torch.stack([once.flatten(), again]))[0, 1]
    assert abs(between) < 5 / again.numel() ** 0.5


def test_dynamic_images_are_drawn_by_seed_epoch_and_index(mnist: Path) -> None:
    def draws(**options) -> torch.Tensor:
        """Each training image in the order of the source, by way of the loader."""
        epoch = options.pop("epoch", 0)
        data = ready(mnist, binarization="dynamic", **GREY, **options)
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        order = torch.cat([indices for indices, _ in loader.sampler])
        return join(loader)[order.argsort()]

    first = draws(batch_size=4)
    for options in ({"batch_size": 10}, {"seed": 3}, {"num_workers": 2}):
        assert torch.equal(draws(**{"batch_size": 4, **options}), first)
    others = [draws(epoch=1), draws(epoch=2), draws(binarization_seed=1)]
    for other in others:
        # Half of the pixels or so are far from certain.
        assert (other != first).float().mean() > 0.1
    assert torch.equal(draws(epoch=1, batch_size=5), others[0])


def test_evaluation_takes_one_draw(mnist: Path) -> None:
    def evaluated(name: str, **options) -> torch.Tensor:
        return in_order(ready(mnist, binarization="dynamic", **GREY, **options), name)

    data = ready(mnist, binarization="dynamic", **GREY)
    for name in SETS:
        assert torch.equal(evaluated(name, seed=5, batch_size=3), evaluated(name))
        assert not torch.equal(evaluated(name, binarization_seed=1), evaluated(name))
    loader = data.val_dataloader()
    before = rows_of(join(loader))
    loader.sampler.set_epoch(4)
    assert rows_of(join(loader)) == before
    # A part is drawn as the whole is.
    part = rows_of(join(data.train_eval_dataloader(examples=4)))
    assert sorted(part) == sorted(rows_of(evaluated("train")[::5]))
    assert torch.equal(join(data.predict_dataloader()), evaluated("test"))
    # No two sets share their draws: the same grey levels lie at the top of all.
    assert not torch.equal(evaluated("train")[:10, :, :8], evaluated("val")[:, :, :8])
