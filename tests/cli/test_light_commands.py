"""The front door: what needs no torch does not import it, and answers at once."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import SCRIPT, run
from lightning.pytorch import Trainer

from ln_zoo import __version__
from ln_zoo.cli import main, spelling

HEAVY = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "torchmetrics",
    "datasets",
    "jsonargparse",
    "numpy",
}


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
    metric = {
        "name": "error",
        "value": 0.0123,
        "unit": "fraction",
        "dataset": "mnist",
        "split": "test",
    }
    results = {
        "format_version": 1, "metrics": [metric], "evaluation": {}, "training": {}, "size": {},
        "data": {"dataset": "mnist"}, "card": {},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--version"], f"ln-zoo {__version__}"),
        (["--help"], "ln-zoo fit --config configs/quickstart.yaml"),
        ([], "ln-zoo fit --config configs/quickstart.yaml"),
        (["list"], "1,234"),
        (["list", "mlp.*", "--norm=layernorm"], "MLPClassifier"),
        (["cards"], "mlp.mine"),
        (["cards", "mlp.mine"], "# mlp.mine"),
        (["card", "--help"], "--results"),
        (["publish", "--help"], "--repo_id"),
        (["compare", "--help"], "--metric"),
        (["analyze", "invariance", "--help"], "--weight_scale"),
        (["analyze", "fisher", "--help"], "--draws"),
        (["analyze", "dynamics", "--help"], "--exponents"),
        (["kernels", "--help"], "--rebuild"),
        (["lsit"], "'list'"),
        (["fit", "--trainer.max_epoch=3"], "'trainer.max_epochs'"),
        (["fit", "--data=MNITS"], "'MNIST'"),
        (["fit", "--model=MLPClassifier", "--model.norm=LayrNorm"], "'LayerNorm'"),
        (["fit", "--model=DRAW", "--model.lrr=3"], "'lr'"),
        (["fit", "--config=none.yaml"], "none.yaml"),
        (["fit", "--ckpt_path=none.ckpt"], "none.ckpt"),
    ],
)
def test_imports_nothing_heavy(
    here: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], answer: str
) -> None:
    card(here / "cards/mlp.mine")
    monkeypatch.setenv("LN_ZOO_MODELS", str(here / "cards"))
    code = (
        "import sys\nfrom ln_zoo.cli import main\n"
        f"try: main({argv})\nexcept SystemExit: pass\n"
        "print('MODULES', *sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *answered, modules = done.stdout.splitlines()
    assert answer in "\n".join(answered) + done.stderr
    assert HEAVY & set(modules.split()) == set()


@pytest.mark.parametrize("group", spelling.ROOMS)
def test_names_are_those_that_python_finds(group: str) -> None:
    """Where they are certain, so that no right name is taken for a misspelt one."""
    room, root = spelling.ROOMS[group]
    module, found = importlib.import_module(f"ln_zoo.{room}"), spelling.classes(room, root)
    for name, names in found.items():
        if names is not None and hasattr(module, name):
            assert names == list(inspect.signature(getattr(module, name)).parameters), name
    for method in ("__init__", "fit", "validate", "test", "predict"):
        known = list(inspect.signature(getattr(Trainer, method)).parameters)
        assert spelling._trainer(method) == known[1:]


def test_the_installed_script_answers_at_once() -> None:
    """Within 0.3 s of processor time: where much else runs, the clock tells little."""
    import resource

    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout == f"ln-zoo {__version__}\n"
    assert min(times) < 0.3


def test_main_returns_its_code(here: Path) -> None:
    assert run("--version").out == f"ln-zoo {__version__}\n"
    assert run("nonsense").code == 2
    assert run("fit", "--nonsense").code == 2
    assert run("fit", "--help").code == 0


@pytest.mark.parametrize("first", [[], ["", "x"], ["HERE", "x"], ["x", "HERE"]])
def test_the_current_folder_is_searched_last(
    here: Path, monkeypatch: pytest.MonkeyPatch, first: list[str]
) -> None:
    before = [str(Path.cwd()) if entry == "HERE" else entry for entry in first]
    monkeypatch.setattr(sys, "path", list(before))
    assert main(["--version"]) == main(["--version"]) == 0
    # Python's own entry for it, of `python -m` and `python -c`, stays where it is.
    assert sys.path == (before or [str(Path.cwd())])
