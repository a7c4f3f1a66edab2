"""The front door: what needs no torch does not import it, and answers at once."""

from __future__ import annotations

import importlib
import inspect
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import SCRIPT, heavy_imports
from lightning.pytorch import Trainer

from ln_zoo import __version__
from ln_zoo.cli import main, precheck


def card(folder: Path) -> None:
    """A card folder, as far as listing it goes."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# mlp.mine\n")
    config = {
        "format_version": 1, "name": "mlp.mine", "library": {"name": "ln_zoo", "version": "0"},
        "model": "MLPClassifier", "preprocessing": {}, "parameters": 1234,
        "init_args": {"norm": {"class": "LayerNorm", "init_args": {}}},
        "files": {"model.safetensors": {"sha256": "0" * 64, "size": 1}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    metric = {"name": "error", "value": 0.01, "unit": "fraction", "dataset": "mnist"}
    results = {"format_version": 1, "metrics": [metric | {"split": "test"}]}
    results |= {part: {} for part in ("evaluation", "training", "size", "card")}
    (folder / "results.json").write_text(json.dumps(results | {"data": {"dataset": "mnist"}}))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--version", f"ln-zoo {__version__}"),
        ("", "ln-zoo fit --config configs/quickstart.yaml"),
        ("list mlp.* --norm=layernorm", "1,234"),
        ("cards mlp.mine", "# mlp.mine"),
        ("publish --help", "--repo_id"),
        ("analyze invariance --help", "--weight_scale"),
        ("write a --model m --width 0", "--width"),
        ("lsit", "'list'"),
        ("fit --trainer.max_epoch=3", "'trainer.max_epochs'"),
        ("fit --model=MLPClassifier --model.norm=LayrNorm", "'LayerNorm'"),
        ("fit --model=DRAW --model.lrr=3", "'lr'"),
        ("fit --ckpt_path=none.ckpt", "none.ckpt"),
    ],
)
def test_imports_nothing_heavy(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str, answer: str
) -> None:
    card(here / "cards/mlp.mine")
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    printed, heavy = heavy_imports(*given.split())
    assert answer in printed
    assert heavy == set()


@pytest.mark.parametrize("group", precheck.CLASS_FOLDERS)
def test_parameters_are_those_that_python_finds(group: str) -> None:
    """Where they are certain, so that no right name is taken for a misspelt one."""
    package, root = precheck.CLASS_FOLDERS[group]
    module = importlib.import_module(f"ln_zoo.{package}")
    for name, names in precheck.classes(package, root).items():
        if names is not None and hasattr(module, name):
            assert list(names) == list(inspect.signature(getattr(module, name)).parameters), name
    for method in ("__init__", "fit", "validate", "test", "predict"):
        known = list(inspect.signature(getattr(Trainer, method)).parameters)
        assert list(precheck._trainer(method)) == known[1:]


def test_the_installed_script_answers_at_once() -> None:
    """Within 0.3 s of processor time; wall time depends on what else runs."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout == f"ln-zoo {__version__}\n"
    assert min(times) < 0.3


@pytest.mark.parametrize("first", [[], ["", "x"], ["HERE", "x"], ["x", "HERE"]])
def test_the_current_folder_is_searched_last(
    here: Path, monkeypatch: pytest.MonkeyPatch, first: list[str]
) -> None:
    before = [str(Path.cwd()) if entry == "HERE" else entry for entry in first]
    monkeypatch.setattr(sys, "path", list(before))
    assert main(["--version"]) == main(["--version"]) == 0
    # Python's own entry for it, of `python -m` and `python -c`, stays where it is.
    assert sys.path == (before or [str(Path.cwd())])
