"""Options of datasets: each is stated once, and shown wherever a dataset is chosen."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule
from refusals import refuses

from ln_zoo import data
from ln_zoo.data import Books, SyntheticBooks
from ln_zoo.data.base import ZooDataModule

MODULES = [
    cls
    for cls in vars(data).values()
    if inspect.isclass(cls) and issubclass(cls, ZooDataModule) and not inspect.isabstract(cls)
]
COMMON = {"batch_size", "seed", "eval_batch_size", "num_workers", "pin_memory", "drop_last"}


def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--config", action="config")
    made.add_subclass_arguments(LightningDataModule, "data")
    return made


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_every_option_has_a_default_and_a_description(
    cls: type[ZooDataModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    listed = ArgumentParser()
    listed.add_class_arguments(cls, "it")
    actions = {a.dest.removeprefix("it."): a for a in listed._actions if a.dest.startswith("it.")}
    parameters = inspect.signature(cls).parameters
    assert actions.keys() == parameters.keys() >= COMMON
    for name, parameter in parameters.items():
        assert actions[name].default == parameter.default
        assert actions[name].help
    made = cls(**{name: parameter.default for name, parameter in parameters.items()})
    for name in ("batch_size", "drop_last"):
        assert getattr(made, name) == parameters[name].default


def test_options_of_all_classes_are_read_by_name_and_from_a_file(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"books": 7, "max_length": 9, "val_books": ["a"], "drop_last": True}
    configuration = {"data": {"class_path": "ln_zoo.data.SyntheticBooks", "init_args": chosen}}
    (tmp_path / "x.yaml").write_text(yaml.dump(configuration))
    words = ["--data=SyntheticBooks", "--data.books=7", "--data.max_length=9"]
    words += ["--data.val_books=[a]", "--data.drop_last=true"]
    for argv in (words, [f"--config={tmp_path / 'x.yaml'}"]):
        made = parser().instantiate_classes(parser().parse_args(argv)).data
        assert isinstance(made, SyntheticBooks)
        assert (made.number_of_books, made.max_length, made.batch_size) == (7, 9, 16)
        assert (made.val_books, made.drop_last, made.vocabulary_size) == (["a"], True, 1000)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    refuses("max_lenght", Books, str(tmp_path), max_lenght=3, error=TypeError)
    argv = ["--data=SyntheticBooks", "--data.max_lenght=3"]
    refuses("max_lenght", parser().parse_args, argv, error=Exception)


def test_a_users_dataset_inherits_options() -> None:
    class Mine(SyntheticBooks):
        def __init__(self, colour: str, batch_size: int = 3, **options: Any) -> None:
            super().__init__(batch_size=batch_size, **options)

    parameters = inspect.signature(Mine).parameters
    assert list(parameters)[:2] == ["colour", "batch_size"]
    assert parameters["batch_size"].default == 3
    assert parameters["val_books"].default == 2
    assert Mine("red", seed=5).seed == 5
