"""Wrong input: one line that names place, cause and remedy; exit code 2; nothing run or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_support import CONFIGS, SMALL, python, run, write_idx

OWN = "the import path of your own, such as my_file.MyClass"
DATA = (
    "BinarizedDigits, BinarizedMNIST, Books, CaptionedImages, ClozeQA, Digits, IAMOnDB, MNIST, "
    "SentenceFile, SyntheticBooks, SyntheticClozeQA, SyntheticHandwriting, SyntheticScenes"
)
MODELS = (
    "AttentiveReader, ConvClassifier, DRAW, Handwriting, MLPClassifier, OrderEmbedding, "
    "SequenceClassifier, SkipThought"
)
NORMS = f"(BatchNorm, Identity, LayerNorm, RMSNorm, WeightNorm, or {OWN})"
ARGUMENTS = (
    "(it takes in_features, hidden_sizes, num_classes, norm, normalize_logits, activation, lr)"
)
BATCHES = (
    "(it takes batch_size, train_size, val_size, eval_batch_size, image_size, seed, num_workers, "
    "pin_memory, drop_last)"
)
#: Most mistakes are told before torch is imported; the words of the parser are the same.
EARLY_AND_LATE = pytest.mark.parametrize("early", [True, False], ids=["early", "late"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Names
        (
            ["--model.norm", "LayrNorm"],
            f"model.norm: no class 'LayrNorm' is known; did you mean 'LayerNorm'? {NORMS}",
        ),
        (
            ["--model.norm=LayerNorm", "--model.norm.epss=1"],
            "model.norm: LayerNorm takes no argument 'epss'; did you mean 'eps'? "
            "(it takes gain, eps, convolution, per_gate)",
        ),
        (
            ["--model.hidden_sises=[3]"],
            "model: MLPClassifier takes no argument 'hidden_sises'; did you mean "
            f"'hidden_sizes'? {ARGUMENTS}",
        ),
        (
            ["--data.batchsize=4"],
            "data: Digits takes no argument 'batchsize'; did you mean 'batch_size'? " + BATCHES,
        ),
        (
            ["--data=MNITS"],
            f"data: no class 'MNITS' is known; did you mean 'MNIST'? ({DATA}, or {OWN})",
        ),
        (
            ["--model=MLPClasifier"],
            "model: no class 'MLPClasifier' is known; did you mean 'MLPClassifier'? "
            f"({MODELS}, or {OWN})",
        ),
        (
            ["--trainer.logger=CSVLoger"],
            "trainer.logger: no class 'CSVLoger' is known; did you mean 'CSVLogger'? (CSVLogger, ",
        ),
        (
            ["--trainer.callbacks+=EpochEvaluatio"],
            "trainer.callbacks: no class 'EpochEvaluatio' is known; did you mean "
            f"'EpochEvaluation'? (give {OWN})",
        ),
        (
            ["--trainer.max_epoch=2"],  # argparse would take it for an abbreviation
            "unknown argument --trainer.max_epoch=2; did you mean 'trainer.max_epochs'?",
        ),
        (["--modle.lr", "3"], "unknown argument --modle.lr 3; did you mean 'model.lr'?"),
        (["--ckpt_pth", "x"], "unknown argument --ckpt_pth x; did you mean 'ckpt_path'?"),
        (["stray"], "unexpected stray: every value needs the name of its option"),
        (
            ["--model.norm=no_such_file.MyNorm"],
            "model.norm: No module named 'no_such_file': it is neither installed nor a file in the "
            "current folder",
        ),
        (
            ["--model.norm=ln_zoo.norms.LayrNorm"],
            "model.norm: module 'ln_zoo.norms' has no attribute 'LayrNorm'; did you mean "
            "'LayerNorm'?",
        ),
        (
            ["--model.norm=torch.nn.LayerNorm"],
            "model.norm: 'torch.nn.LayerNorm' is not a subclass of Norm",
        ),
        # Base classes are none of the models
        (
            ["--model=Classifier"],
            f"model: 'Classifier' is a base class: give one of its subclasses ({MODELS})",
        ),
        (
            ["--model=ZooModule"],
            f"model: 'ZooModule' is a base class: give one of its subclasses ({MODELS})",
        ),
        # Types
        (
            ["--model.norm=LayerNorm", "--model.norm.eps=x"],
            "model.norm.eps: expected float, got 'x'",
        ),
        (["--model.lr=fast"], "model.lr: expected float, got 'fast'"),
        (["--model.hidden_sizes=x"], "model.hidden_sizes: expected tuple or list, got 'x'"),
        (
            ["--model.activation=gelu"],
            "model.activation: expected one of 'relu', 'tanh', got 'gelu'",
        ),
        (["--trainer.max_epochs=two"], "trainer.max_epochs: expected int, got 'two'"),
        (["--seed_everything=abc"], "seed_everything: expected bool or int, got 'abc'"),
    ],
)
@EARLY_AND_LATE
def test_wrong_arguments(here: Path, arguments: list[str], message: str, early: bool) -> None:
    done = run("fit", *SMALL, *arguments, early=early)
    first, second = done.err.splitlines()
    assert first.startswith(f"ln-zoo: error: {message}")
    assert first == f"ln-zoo: error: {message}" or message.endswith("(CSVLogger, ")
    assert second == "options: ln-zoo fit --help"
    assert (done.code, done.out, list(here.iterdir())) == (2, "", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.norm=LayerNorm", "--model.norm.eps=-1"],
            "LayerNorm: eps must be a finite number >= 0",
        ),
        (["--model.lr=-1"], "lr must be positive, got -1.0"),
        (["--model.hidden_sizes=[0]"], "every size must be at least 1, got {'hidden_size"),
        (["--data.batch_size=0"], "batch_size must be an integer of at least 1, got 0"),
        (
            ["--data.train_size=2000"],
            "train_size 2000 + val_size 20 exceed the 1497 images of digits",
        ),
        (
            ["--data=MNIST", "--data.root=nowhere"],
            "no folder nowhere: give the folder of a local copy",
        ),
        (["--ckpt_path=no.ckpt"], "there is no checkpoint 'no.ckpt': give a file, or `last`"),
        (["--ckpt_path=best"], "there is no checkpoint 'best': give a file, or `last`"),
        (["--ckpt_path=last"], "--ckpt_path last: there is no */checkpoints/*.ckpt in runs"),
        (["--weights=mlp.nothing"], "no model 'mlp.nothing'"),
        (
            ["--weights=a.ckpt", "--ckpt_path=b.ckpt"],
            "--ckpt_path resumes a run, --weights starts a new one: give one of them",
        ),
        (["--trainer.logger=WandbLogger"], "Requirement 'wandb"),
        (["--trainer.strategy=ddpp"], "You selected an invalid strategy name: `strategy='ddpp'`"),
    ],
)
def test_values_that_cannot_be(here: Path, arguments: list[str], message: str) -> None:
    done = run("fit", *SMALL, *arguments)
    told = [line for line in done.err.splitlines() if line.startswith("ln-zoo")]
    assert [line[: 19 + len(message)] for line in told] == [f"ln-zoo fit: error: {message}"]
    assert (done.code, done.out, list(here.iterdir())) == (2, "", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {class_path: MLPClassifier, init_args: {hiden_sizes: [3]}}\n",
            "ln-zoo: error: model: MLPClassifier takes no argument 'hiden_sizes'; did you mean "
            f"'hidden_sizes'? {ARGUMENTS}",
        ),
        (
            "model: {init_args: {norm: {class_path: LayerNorm, init_args: {epsilon: 3}}}}\n",
            "ln-zoo: error: model.norm: LayerNorm takes no argument 'epsilon'; did you mean 'eps'? "
            "(it takes gain, eps, convolution, per_gate)",
        ),
        (
            "trainer: {max_epoch: 3}\n",
            "ln-zoo: error: fit takes no 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?",
        ),
        (
            "trainr: {max_epochs: 3}\n",
            "ln-zoo: error: fit takes no 'trainr.max_epochs'; did you mean 'trainer.max_epochs'?",
        ),
        (
            "model: [MLPClassifier\ndata: Digits\n",
            "ln-zoo fit: error: bad.yaml, line 2 is not YAML: expected ',' or ']', but got ':'",
        ),
        (
            "just words\n",
            "ln-zoo fit: error: bad.yaml holds no options: expected YAML with lines `name: value`",
        ),
    ],
)
@EARLY_AND_LATE
def test_wrong_configuration_files(here: Path, text: str, message: str, early: bool) -> None:
    (here / "bad.yaml").write_text(text)
    done = run("fit", *SMALL, "--config", "bad.yaml", early=early)
    assert done.err.splitlines()[0] == message
    assert (done.code, done.out) == (2, "")


def test_no_configuration_file(here: Path) -> None:
    (here / "nine.yaml").touch()
    done = run("fit", *SMALL, "--config", "none.yaml")
    assert done.code == 2
    assert done.err.splitlines()[0] == (
        "ln-zoo fit: error: --config none.yaml: there is no such file; did you mean 'nine.yaml'?"
    )


def test_missing_model_and_data() -> None:
    done = run("fit")
    assert done.code == 2
    assert done.err.splitlines() == [
        "ln-zoo: error: --data and --model must be given, here or in a file with --config",
        "options: ln-zoo fit --help",
    ]
    assert "error: --data must be given" in run("fit", "--model=MLPClassifier").err


def test_arguments_before_their_class_do_not_choose_the_base_class() -> None:
    done = run("fit", "--model.in_features=40", "--model=MLPClassifier", "--data=Digits")
    assert done.code == 2
    assert done.err.splitlines()[0] == (
        "ln-zoo: error: model: give the class before its arguments, as in --model NAME --model.x 1 "
        f"({MODELS})"
    )


def test_base_classes_are_not_offered() -> None:
    done = run("fit", "--help")
    assert done.code == 0
    help_text = " ".join(done.out.split())
    listed = re.search(r"known subclasses: (ln_zoo\.models\.[^)]*)\)", help_text)
    assert listed is not None
    found = listed[1].split(", ")
    assert sorted(found) == [f"ln_zoo.models.{name}" for name in MODELS.split(", ")]


def test_a_file_called_like_a_package(here: Path) -> None:
    (here / "datasets.py").write_text("class Faces: pass")
    done = run("fit", "--model=MLPClassifier", "--data=datasets.Faces")
    assert done.code == 2
    assert (
        "data: module 'datasets' has no attribute 'Faces': that is the installed package, which "
        "takes precedence over ./datasets.py: rename your file\n"
    ) in done.err


def test_unknown_command() -> None:
    done = run("tset")
    assert done.code == 2
    assert done.err.splitlines()[0] == (
        "ln-zoo: error: unknown command 'tset'; did you mean 'test'?"
    )
    assert "commands: fit, validate, test, predict, list, cards, card, publish" in done.err


def test_two_norms_of_one_short_name_are_told_apart(here: Path) -> None:
    (here / "twin_norms.py").write_text(
        "from dataclasses import dataclass\n"
        "import ln_zoo.norms\n"
        "@dataclass(frozen=True)\n"
        "class RMSNorm(ln_zoo.norms.Norm):\n    eps: float = 1.0\n"
    )
    # A process of its own: the twin would stay.
    command = ["fit", *SMALL, "--model.norm=RMSNorm"]
    done = python(here, f"import sys, twin_norms\nsys.exit(main({command}))")
    assert done.code == 2
    first = done.err.splitlines()[0]
    assert first.startswith("ln-zoo: error: model.norm: ")
    assert "twin_norms.RMSNorm" in first
    assert "ln_zoo.RMSNorm" in first or "ln_zoo.norms.RMSNorm" in first


def test_errors_keep_their_traceback_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_DEBUG", "1")
    with pytest.raises(AssertionError, match=r"Traceback[\s\S]*ValueError: lr must be positive"):
        run("fit", *SMALL, "--model.lr=-1")


def test_truncated_data_fail_before_training(here: Path) -> None:
    folder = write_idx(here / "mnist")
    images = folder / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    done = run(
        "fit", "--model=MLPClassifier", "--data=MNIST", f"--data.root={folder}",
        "--data.train_size=40", "--data.val_size=20",
    )  # fmt: skip
    assert done.code == 1
    assert "t10k-images-idx3-ubyte" in done.err.splitlines()[-1]
    assert not list(here.glob("runs/**/*.ckpt"))


def test_a_batch_of_one_under_batch_norm(here: Path) -> None:
    done = run(
        "fit", *SMALL, "--config", CONFIGS / "norms/batch.yaml", "--data.batch_size=1",
        "--trainer.enable_progress_bar=false",
    )  # fmt: skip
    assert done.code == 1
    assert (
        "ln-zoo fit: error: BatchNorm needs at least 2 examples per feature in training, got 1: "
        "use a larger batch_size"
    ) in done.err
