import torch

from ln_zoo.data import BinarizedDigits, Digits


def read(**options) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return Digits(**options).read()


def test_splits_are_disjoint_and_complete():
    sets = read()
    assert {name: len(labels) for name, (_, labels) in sets.items()} == {
        "train": 1297,
        "val": 200,
        "test": 300,
    }
    images = torch.cat([images for images, _ in sets.values()]).flatten(1)
    assert images.dtype == torch.uint8
    # scikit-learn's set has no two equal images, so equal rows would be a repeated example.
    assert len(images.unique(dim=0)) == 1797


def test_splits_are_stratified():
    for images, labels in read().values():
        share = labels.bincount(minlength=10) / len(labels)
        assert share.min() > 0.09
        assert share.max() < 0.11
        assert images.shape[1:] == (1, 8, 8)


def test_test_set_is_always_the_same():
    reference = read()["test"]
    for options in ({"seed": 3}, {"train_size": 100, "val_size": 50}):
        images, labels = read(**options)["test"]
        assert torch.equal(images, reference[0])
        assert torch.equal(labels, reference[1])


def test_a_smaller_training_set_is_part_of_the_larger():
    assert torch.equal(read(train_size=100)["train"][0], read()["train"][0][:100])


def test_batches_are_in_the_unit_interval():
    data = Digits(batch_size=32)
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    whole = torch.cat([images for images, _ in data.train_eval_dataloader()])
    assert (whole.min(), whole.max()) == (0, 1)
    assert data.in_features == 64


def test_digits_of_the_size_of_mnist():
    data = Digits(image_size=28)
    assert (data.name, data.image_shape, data.in_features) == ("digits-28", (1, 28, 28), 784)
    data.setup()
    images = data.evaluation_set("test").inputs
    assert images.dtype == torch.uint8
    grey = BinarizedDigits(image_size=28, binarization="grey")
    grey.setup()
    (expected,) = grey.evaluation_set("test")[torch.arange(300)]
    assert torch.equal(images / data.scale, expected)
    assert torch.equal(data.evaluation_set("test").labels, read()["test"][1])
