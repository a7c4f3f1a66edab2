"""Checkpoints from anywhere choose no module to import, no file to read and no code to run."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refuses

from ln_zoo.cli.commands import own_module
from ln_zoo.layers import GRU
from ln_zoo.models import DRAW, Handwriting, MLPClassifier, SequenceClassifier, SkipThought
from ln_zoo.norms import LayerNorm, to_config
from ln_zoo.utils.trust import Reader
from ln_zoo.zoo import loading
from ln_zoo.zoo.reading import _why_unreadable

NORM = to_config(LayerNorm())


@pytest.fixture
def red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a trace when it is imported; on the path, last."""
    (tmp_path / "redteam_mod.py").write_text("open('imported', 'w')\nclass Foo: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "redteam_mod", raising=False)
    return tmp_path


def read(stored: Any, **options: Any) -> dict[str, Any]:
    return Reader("x.ckpt", "give --{place} {path}", **options).arguments(MLPClassifier, stored)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"norm": {"class_path": "redteam_mod.Foo"}}, "norm .*redteam_mod.Foo.*--model.norm red"),
        ({"norm": NORM | {"init_args": {"eps": {"class_path": "red.X"}}}}, "norm.eps .*red.X"),
        ({"norm": NORM | {"init_args": ["eps"]}}, "norm .*eps"),
        ({"norm": {"class_path": "ln_zoo.models.MLPClassifier"}}, "MLPClassifier, not a Norm"),
        ({"norm": {"class_path": "os.system"}}, "os.system, not a Norm"),
        ({"norm": {"class_path": ["redteam_mod"]}}, "norm .*redteam_mod"),
        ({"norm": {"class_path": "lib2to3.pgen2.driver.Driver"}}, "lib2to3"),
        ({"norm": "redteam_mod.Foo"}, "norm .*redteam_mod.Foo"),
        ({"norm": "/path.yaml"}, "norm .*/path.yaml"),
        ({"norm": ["redteam_mod.Foo"]}, "norm .*redteam_mod.Foo"),
        ({"hidden_sizes": [{"class_path": "red.X"}]}, "hidden_sizes"),
        ({"hidden_sizes": [1.5]}, "hidden_sizes"),
        ({"hidden_sizes": "[8]"}, "hidden_sizes"),
        ({"num_classes": True}, "num_classes"),
        ({"hidden_sizes": [1] * 10_001}, "hidden_sizes has 10,001 values"),
        ({"activation": "softsign"}, "activation .*'relu', 'tanh'.*softsign"),
        ({"lr": "1e-3"}, "lr .*1e-3"),
        ({"lr": b"1"}, "bytes"),
        ({"hiden_sizes": [8]}, "'hiden_sizes'.*hidden_sizes"),
        ({"lr": {1: 2}}, "lr"),
    ],
)
def test_what_does_not_fit_its_kind_is_refused(red: Path, stored: Any, message: str) -> None:
    refuses(f"x.ckpt.*{message}", read, stored)
    assert not (red / "imported").exists()


def test_values_arrive_as_objects() -> None:
    found = read({"hidden_sizes": [8], "normalize_logits": None, "lr": 1, "norm": NORM})
    assert found == {"hidden_sizes": [8], "normalize_logits": None, "lr": 1, "norm": LayerNorm()}
    reader = Reader("x.ckpt")
    draw = reader.arguments(DRAW, {"image_size": [28, 28], "normalize": ["input"]})
    assert draw == {"image_size": (28, 28), "normalize": ["input"]}
    text = "class_path: redteam_mod.Foo"  # an alphabet may be any text
    assert reader.arguments(Handwriting, {"alphabet": text}) == {"alphabet": text}
    cell = {"class_path": "ln_zoo.layers.GRU"}
    assert reader.arguments(SequenceClassifier, {"cell": cell}) == {"cell": GRU}
    refuses("vocabulary.*words.txt", reader.arguments, SkipThought, {"vocabulary": "words.txt"})


class Encoder(torch.nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size


class Mine(MLPClassifier):
    """A user's class: untyped, passed on, and classes of its own."""

    def __init__(self, shape, encoder: Encoder, sizes: Sequence[int] = (), **options: Any) -> None:
        super().__init__(64, **options)


def test_arguments_of_a_users_class() -> None:
    reader = Reader("x.ckpt")
    encoder = {"class_path": f"{__name__}.Encoder", "init_args": {"size": 3}}
    stored = {"shape": {"a": ["any.text"]}, "encoder": encoder, "sizes": [1], "norm": NORM}
    found = reader.arguments(Mine, stored)
    assert found.pop("encoder").size == 3
    assert found == {"shape": {"a": ["any.text"]}, "sizes": [1], "norm": LayerNorm()}
    refuses("hidden_sizes", reader.arguments, Mine, {"hidden_sizes": "x"})  # of the base class
    refuses("red.X", reader.arguments, Mine, {"shape": [{"class_path": "red.X"}]})
    # Without an annotation, a norm of ours or what the user named.
    assert reader.arguments(Mine, {"shape": NORM}) == {"shape": LayerNorm()}
    refuses("Encoder", reader.arguments, Mine, {"shape": encoder})
    named = Reader("x.ckpt", named={f"{__name__}.Encoder"})
    assert named.arguments(Mine, {"shape": encoder})["shape"].size == 3
    linear = {"class_path": "torch.nn.Linear", "init_args": {}}
    refuses("not a Encoder", reader.arguments, Mine, {"encoder": linear})


def test_named_and_imported_classes_are_admitted(red: Path) -> None:
    (red / "redteam_mod.py").write_text(
        "from ln_zoo.norms import RMSNorm\nopen('imported', 'w')\nclass Foo(RMSNorm): pass\n"
    )
    stored = {"norm": {"class_path": "redteam_mod.Foo"}}
    refuses(r"redteam_mod\.Foo", read, stored, named={"redteam_mod.Bar"})
    assert not (red / "imported").exists()
    refuses(r"redteam_mod\.Bar", read, {"norm": {"class_path": "redteam_mod.Bar"}},
            named={"redteam_mod.Bar"})  # fmt: skip
    (found,) = read(stored, named={"redteam_mod.Foo"}).values()
    assert type(found).__name__ == "Foo"
    assert read(stored) == {"norm": found}  # it is imported now
    refuses(r"redteam_mod\.Foo", read, stored, loaded=False)


def test_values_that_hold_themselves_or_too_much() -> None:
    endless: list[Any] = []
    endless.append(endless)
    refuses("x.ckpt", read, {"hidden_sizes": endless})
    refuses("x: model", Reader("x").arguments, Mine, {"shape": endless})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"_class_path": "redteam_mod.Foo"}, r"redteam_mod.Foo.*--import redteam_mod"),
        ({"_class_path": ["redteam_mod"]}, "redteam_mod"),
        ({"_class_path": "os.redteam_mod.Foo"}, "os.redteam_mod.Foo"),
        ({"_class_path": "torch.nn.Linear"}, "torch.nn.Linear, not a LightningModule"),
        ({"_class_path": "ln_zoo.models.MLPClassifier", 5: 1}, "5"),
        ({"norm": None}, "model class"),
        ([1, 2], "model class"),
        (None, "model class"),
    ],
)
def test_checkpoints_of_other_classes(red: Path, stored: Any, message: str) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": stored}, "x.ckpt")
    refuses(rf"x\.ckpt.*{message}", loading.find, "x.ckpt")
    assert not (red / "imported").exists()


def test_the_import_option() -> None:
    own_module("--import", "json")
    for name in ("no_such_module", "", ".relative", "a..b"):
        refuses("--import", own_module, "--import", name)


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
    told = _why_unreadable(caught.value)
    assert told.startswith(reason)
    assert "weights_only" not in told
    assert "\n" not in told
    assert not (red / "ran").exists()
