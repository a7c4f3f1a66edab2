"""Checkpoints from anywhere choose no module to import, no file to read and no code to run."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from refusals import refused

from ln_zoo import models
from ln_zoo.models import ZooModule
from ln_zoo.norms import LayerNorm, to_config
from ln_zoo.zoo import source
from ln_zoo.zoo.trust import OwnModuleError, check_classes, import_own, is_loaded, why_unreadable

OURS = "ln_zoo.models.MLPClassifier"
NORM = to_config(LayerNorm())


@pytest.fixture
def red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a trace when it is imported; on the path, last."""
    (tmp_path / "redteam_mod.py").write_text("open('imported', 'w')\nclass Foo: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "redteam_mod", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"_class_path": "redteam_mod.Foo"}, "is of redteam_mod.Foo, .*, give --model redteam_mod"),
        (
            {"_class_path": OURS, "norm": {"class_path": "redteam_mod.Foo"}},
            "asks for redteam_mod.Foo, which is not .*, give --model.norm redteam_mod",
        ),
        (
            {"_class_path": OURS, "norm": NORM | {"init_args": {"eps": {"class_path": "red.X"}}}},
            "asks for red.X, .*, give --model.norm.eps red.X",
        ),
        ({"_class_path": OURS, "sizes": [{"class_path": "red.X"}]}, "asks for red.X"),
        ({"_class_path": OURS, "norm": "redteam_mod.Foo"}, r"norm.*class_path"),
        ({"_class_path": OURS, "norm": "/path.yaml"}, r"norm.*class_path"),
        ({"_class_path": OURS, "norm": ["redteam_mod.Foo"]}, r"norm.*class_path"),
        ({"_class_path": ["redteam_mod"]}, "a class path must be text"),
        # What import would look for inside of a package that is there.
        ({"_class_path": "os.redteam_mod.Foo"}, "is of os.redteam_mod.Foo"),
        ({"_class_path": "lib2to3.pgen2.driver.Driver"}, "is of lib2to3"),
        ({"_class_path": "redteam_mod"}, "is of redteam_mod,"),
        ({"_class_path": ""}, "is of ,"),
        ({"norm": None}, r"x.ckpt.*model class"),
        ([1, 2], r"x.ckpt.*model class"),
        (None, r"x.ckpt.*model class"),
    ],
)
def test_foreign_classes_are_refused(red: Path, stored: Any, message: str) -> None:
    refused(message, check_classes, stored, "x.ckpt", "give --{place} {path}")
    assert not (red / "imported").exists()


#: Spellings of a class that some reader of arguments would import: plain, YAML, JSON, nested.
SPELLINGS: list[Any] = [
    *("redteam_mod.Foo", " redteam_mod.Foo", '"redteam_mod.Foo"', "[redteam_mod.Foo]"),
    "class_path: redteam_mod.Foo",
    '{"class_path": "redteam_mod.Foo"}',
    '{"class_path": "redteam\\u005fmod\\u002eFoo"}',
    {"class_path": "redteam_mod.Foo"},
    {"class_path": "redteam_mod.Foo", "init_args": {}},
    {"init_args": {"class_path": "redteam_mod.Foo"}},
    ["redteam_mod.Foo"],
    [["redteam_mod.Foo"]],
    [{"class_path": "redteam_mod.Foo"}],
]


def arguments() -> list[tuple[type[ZooModule], str]]:
    classes = [getattr(models, name) for name in models.__all__]
    mine = [c for c in classes if inspect.isclass(c) and issubclass(c, ZooModule)]
    return [(c, name) for c in mine for name in get_type_hints(c.__init__) if name != "return"]


@pytest.mark.parametrize(
    ("model", "name"), arguments(), ids=[f"{c.__name__}-{name}" for c, name in arguments()]
)
def test_no_argument_of_a_model_imports_a_module(
    red: Path, model: type[ZooModule], name: str
) -> None:
    """In no type of argument and no spelling, also if building fails afterwards."""
    for spelling in SPELLINGS:
        stored = {"_class_path": f"ln_zoo.models.{model.__name__}", name: spelling}
        torch.save({"state_dict": {}, "hyper_parameters": stored}, "x.ckpt")
        if name == "vocabulary" and isinstance(spelling, list):  # words of a text
            with contextlib.suppress(ValueError):
                source.find("x.ckpt").build()
        else:
            refused(r"x\.ckpt", source.find, "x.ckpt")
        assert not (red / "imported").exists(), spelling


def test_our_own_and_named_and_imported_classes_are_admitted(red: Path) -> None:
    ours = {"_class_path": OURS, "norm": NORM, "hidden_sizes": [8]}
    assert check_classes(ours, "x", "") == ours
    theirs = {"_class_path": "redteam_mod.Foo", "norm": {"class_path": "redteam_mod.Bar"}}
    named = {"redteam_mod.Foo", "redteam_mod.Bar"}
    assert check_classes(theirs, "x", "", named) == theirs
    refused(r"redteam_mod\.Bar", check_classes, theirs, "x", "", {"redteam_mod.Foo"})
    assert not (red / "imported").exists()
    import_own("redteam_mod")
    assert is_loaded("redteam_mod.Foo")
    assert not is_loaded("redteam_mod.Bar")  # no such class


def test_values_that_hold_themselves() -> None:
    endless: dict[str, Any] = {"_class_path": OURS}
    endless["again"] = [endless]
    assert check_classes(endless, "x", "") == endless


def test_the_import_option() -> None:
    import_own("json")
    for name in ("no_such_module", "", ".relative", "a..b"):
        refused("--import", import_own, name, error=OwnModuleError)


class Payload:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo ran > ran",)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: path.write_text("hello"), "it holds something other than"),
        (lambda path: torch.save({"a": Payload()}, path), "it asks for posix.system, and only"),
        (lambda path: path.write_bytes(pickle.dumps(Payload(), 2)), "it asks for posix.system"),
        (lambda path: torch.save({"a": pathlib.PurePosixPath()}, path), "it asks for pathlib"),
        (lambda path: torch.save({"a": print}, path), "it asks for print"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "PytorchStreamReader failed"),
        (lambda path: path.write_bytes(b""), "it holds something"),
    ],
)
def test_why_a_file_is_refused(red: Path, write: Callable[[Path], object], reason: str) -> None:
    write(red / "x.ckpt")
    with pytest.raises((pickle.UnpicklingError, LookupError, EOFError, RuntimeError)) as caught:
        torch.load(red / "x.ckpt", weights_only=True)
    told = why_unreadable(caught.value)
    assert told.startswith(reason)
    assert "weights_only" not in told
    assert "\n" not in told
    assert not (red / "ran").exists()
