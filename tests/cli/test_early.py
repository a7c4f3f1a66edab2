"""Mistakes told before torch is imported: the sources are read as Python reads them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from cli_support import CONFIGS, SMALL, run
from lightning.pytorch import LightningDataModule, Trainer

import ln_zoo.data
import ln_zoo.models
import ln_zoo.norms
from ln_zoo.cli import early, signatures

PACKAGES = {"model": ln_zoo.models, "data": ln_zoo.data, "norm": ln_zoo.norms}
BASES = {
    "model": ln_zoo.models.ZooModule,
    "data": LightningDataModule,
    "norm": ln_zoo.norms.Norm,
}


@pytest.mark.parametrize("group", PACKAGES)
def test_classes_are_those_that_python_finds(group: str) -> None:
    found = signatures.classes(group)
    exported = {
        name: cls
        for name, cls in vars(PACKAGES[group]).items()
        if isinstance(cls, type) and issubclass(cls, BASES[group])
    }
    assert exported.keys() <= found.keys()
    for name, cls in exported.items():
        assert found[name].concrete is not (inspect.isabstract(cls) or cls is BASES[group]), name
        if not found[name].concrete:
            continue
        arguments = inspect.signature(cls).parameters
        assert list(found[name].parameters) == list(arguments), name
        for argument, parameter in arguments.items():
            expected = found[name].parameters[argument]
            plain = isinstance(parameter.default, bool | int | float | str)
            if plain and "type[" not in parameter.annotation:  # a class is left to the parser
                assert expected is not signatures.Any, (name, argument)


@pytest.mark.parametrize("method", ["__init__", "fit", "validate", "test", "predict"])
def test_arguments_of_the_trainer_are_those_that_python_finds(method: str) -> None:
    found = signatures.trainer(method)
    assert found is not None
    known = list(inspect.signature(getattr(Trainer, method)).parameters)
    assert list(found.parameters) == known[1:]


def test_literals_of_one_name_are_those_of_the_file_that_a_class_is_in() -> None:
    """Both files call theirs ``Reduction``."""
    known = signatures.classes("model")
    expected = {"Handwriting": {"point", "line"}, "SkipThought": {"sum", "token_mean"}}
    for name, words in expected.items():
        assert set(get_args(known[name].parameters["loss_reduction"])) == words


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_passes(path: Path) -> None:
    if path.parent.name != "cards":
        early.check(["fit", f"--config={path}"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "my_models.Mine", "--model.anything", "3", "--data=my_data.Mine"],
        ["--model=MLPClassifier", "--model.norm=my_norms.Mine", "--model.norm.any=1"],
        ['--model={"class_path": "MLPClassifier", "init_args": {"lr": 3}}', "--data=Digits"],
        ["--model=MLPClassifier", "--model.norm.help=LayerNorm", "--nonsense"],
        ["--model=MLPClassifier", "--model.hidden_sizes+=3", "--data", "Digits"],
        ["--model=MLPClassifier", "--model.norm=null", "--model.lr=1e-3"],
        # The arguments may be of either class.
        ["--model=ConvClassifier", "--model.channels=[[3]]", "--model=MLPClassifier"],
        ["--trainer.logger=false", "--trainer.callbacks+=LearningRateFinder"],
        ["--trainer.logger.save_dir=x", "--trainer.devices=2", "--trainer.max_epochs", "-1"],
        ["--print_config", "--config", '{"trainer": {"max_epochs": 3}}'],
    ],
)
def test_what_is_not_certain_is_left_to_the_parser(arguments: list[str]) -> None:
    early.check(["fit", *arguments])


def test_nothing_heavy_is_imported() -> None:
    mistakes = [
        ["--config=none.yaml"],
        ["--model=MLPClassifier", "--model.lr=fast"],
        ["--data=MNITS"],
        ["--trainer.max_epoch=3"],
        ["--ckpt_path=none.ckpt"],
    ]
    code = (
        "import sys\nfrom ln_zoo.cli import main\n"
        f"print([main(['fit', *arguments]) for arguments in {mistakes}])\n"
        "print({'torch', 'lightning', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2, 2, 2, 2, 2]", "set()"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "LN_ZOO_FIT__TRAINER__MAX_EPOCH",
            "3",
            "LN_ZOO_FIT__TRAINER__MAX_EPOCH names no option of fit; did you mean "
            "'LN_ZOO_FIT__TRAINER__MAX_EPOCHS'?",
        ),
        (
            "LN_ZOO_FIT__TRAINER__MAX_EPOCHS",
            "x",
            "LN_ZOO_FIT__TRAINER__MAX_EPOCHS: trainer.max_epochs: expected int, got 'x'",
        ),
        (
            "LN_ZOO_FIT__MODEL__LR",
            "0.1",
            "LN_ZOO_FIT__MODEL__LR is not read: give --model.lr, or the model as a whole in "
            "LN_ZOO_FIT__MODEL='{class_path: NAME, init_args: {...}}'",
        ),
    ],
)
def test_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = run("fit", *SMALL)
    assert (done.code, done.err.splitlines()[0]) == (2, f"ln-zoo: error: {message}")
