"""Mistakes end in one line with the right exit code, and name what is wrong and what is near.

Sentences are free: a line has to mention the names and values given here.
"""

from __future__ import annotations

import inspect
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cli_support import CONFIGS, QUIET, SCRIPT, SMALL, cli, environment, installed, run, succeed
from refusals import refuses

import ln_zoo.data
import ln_zoo.models
import ln_zoo.norms

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
QUICKSTART = CONFIGS / "quickstart.yaml"
HUGE = "100000000000000000000000"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        # Misspelt names
        ("--model.norm LayrNorm", "model.norm LayrNorm 'LayerNorm'"),
        ("--model.norm=LayerNorm --model.norm.epss=1", "model.norm epss 'eps'"),
        ("--model.hidden_sises=[3]", "MLPClassifier hidden_sises 'hidden_sizes'"),
        ("--data.batchsize=4", "Digits batchsize 'batch_size'"),
        ("--model=DRAW --model.lrr=3", "DRAW lrr 'lr'"),
        ("--data=MNITS", "data MNITS 'MNIST'"),
        ("--model=MLPClasifier", "model MLPClasifier 'MLPClassifier'"),
        ("--trainer.logger=CSVLoger", "trainer.logger CSVLoger 'CSVLogger'"),
        ("--trainer.callbacks+=EpochEvaluatio", "callbacks EpochEvaluatio 'EpochEvaluation'"),
        ("--optimizer=Adamm", "optimizer Adamm 'Adam"),
        ("--optimizer=AdamW --optimizer.weigth_decay=1", "AdamW weigth_decay 'weight_decay'"),
        ("--lr_scheduler=CosineAnealingLR", "lr_scheduler CosineAnealingLR 'CosineAnnealingLR'"),
        # argparse would take this for an abbreviation
        ("--trainer.max_epoch=2", "trainer.max_epoch 'trainer.max_epochs'"),
        ("--modle.lr 3", "modle.lr 'model.lr'"),
        ("--modle 3", "modle 'model'"),
        ("--ckpt_pth x", "ckpt_pth 'ckpt_path'"),
        ("stray", "stray"),
        # Classes that cannot be
        ("--model.norm=no_such_file.MyNorm", "model.norm no_such_file"),
        ("--model.norm=ln_zoo.norms.LayrNorm", "model.norm LayrNorm"),
        ("--model.norm=torch.nn.LayerNorm", "model.norm torch.nn.LayerNorm Norm"),
        ("--model=Classifier", "model Classifier MLPClassifier"),
        ("--model=ZooModule", "model ZooModule MLPClassifier"),
        ("--model.norm=3", "model.norm 3 LayerNorm"),
        ("--model.norm=[1,2]", "model.norm LayerNorm"),
        ("--trainer.logger=WandbLogger", "wandb"),
        # Types
        ("--model.norm=LayerNorm --model.norm.eps=x", "model.norm.eps float x"),
        ("--model.lr=fast", "model.lr float fast"),
        ("--model.hidden_sizes=x", "model.hidden_sizes x"),
        ("--model.activation=gelu", "model.activation 'relu' 'tanh' gelu"),
        ("--trainer.max_epochs=two", "trainer.max_epochs int two"),
        ("--seed_everything=abc", "seed_everything int abc"),
        ("--optimizer=AdamW --optimizer.lr=fast", "optimizer.lr float fast"),
        ("--lr_scheduler_config.interval=steps", "lr_scheduler_config.interval 'epoch' steps"),
        # Values
        ("--trainer.accumulate_grad_batches=0", "accumulate_grad_batches 0"),
        ("--trainer.check_val_every_n_epoch=0", "check_val_every_n_epoch 0"),
        (f"--data.batch_size={HUGE}", "data.batch_size"),
        (f"--model.hidden_sizes=[{HUGE}]", "hidden_sizes"),
        ("--model.norm=LayerNorm --model.norm.gain=1e300", "norm.gain 1e+300"),
        ("--model.lr=nan", "lr nan"),
        ("--model.lr=null", "model.lr float None"),
        ("--data.batch_size=null", "data.batch_size int None"),
        ("--lr_scheduler=CosineAnnealingLR", "lr_scheduler CosineAnnealingLR T_max"),
        ("--lr_scheduler=ReduceLROnPlateau", "ReduceLROnPlateau monitor"),
        ("--model.lr=-1", "lr -1"),
        ("--model.norm=LayerNorm --model.norm.eps=-1", "LayerNorm eps"),
        ("--data.train_size=2000", "train_size 2000 1497"),
        ("--data=MNIST --data.root=nowhere", "nowhere"),
        ("--trainer.strategy=ddpp", "ddpp"),
        ("--lr_scheduler_config.frequency=0", "frequency 1 0"),
        # Checkpoints and weights
        ("--ckpt_path=no.ckpt", "no.ckpt"),
        ("--ckpt_path=best", "best"),
        ("--ckpt_path=last", "last runs"),
        ("--ckpt_path=last --trainer.logger=true", "last logger"),
        ("--weights=mlp.nothing", "mlp.nothing"),
        ("--weights=no.ckpt", "no.ckpt"),
        (f"--weights={'a' * 5000}", "--weights aaa"),
        ("--weights=a.ckpt --ckpt_path=b.ckpt", "--ckpt_path --weights"),
        # Help on what is not known
        ("--config none.yaml", "none.yaml"),
    ],
)  # fmt: skip
def test_options_of_training(here: Path, given: str, says: str) -> None:
    refuses(says.split(), cli, "fit", *SMALL, *given.split())
    assert list(here.iterdir()) == []  # nothing was run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {class_path: MLPClassifier, init_args: {hiden_sizes: [3]}}",
         "hiden_sizes 'hidden_sizes'"),
        ("model: {init_args: {norm: {class_path: LayerNorm, init_args: {epsilon: 3}}}}",
         "epsilon 'eps'"),
        ("trainer: {max_epoch: 3}", "max_epoch max_epochs"),
        ("trainr: {max_epochs: 3}", "trainr trainer"),
        ("model: [MLPClassifier\ndata: Digits", "bad.yaml"),
        ("just words", "bad.yaml"),
        ("model: A\ndata: B\nmodel: C", "bad.yaml 3 'model'"),
        ("model:\n  norm:\n    eps: 1\n    eps: 2", "bad.yaml 4 'eps'"),
        (BOMB, "bad.yaml"),
        ("a: &a [*a]", "bad.yaml"),
        ("model: " + "[" * 3000 + "]" * 3000, "bad.yaml"),
        ("#" * 1_000_001, "bad.yaml"),
        ("data: {init_args: null}", "data.init_args None"),
        ("model: {init_args: x}", "model.init_args 'x'"),
        ("model: {class_path: .inf}", "model.class_path inf"),
        ("model: {init_args: {norm: {class_path: ''}}}", "norm.class_path"),
        ("model: {init_args: {norm: {class_path: .inf}}}", "norm.class_path inf"),
        ("model: {init_args: {norm: {class_path: {a: 1}}}}", "norm.class_path"),
        ("trainer: {plugins: [3]}", "trainer.plugins 3"),
        ("model: [MLPClassifier]", "model MLPClassifier"),
        ("optimizer: [Adam]", "optimizer Adam"),
        ("trainer: {callbacks: [null]}", "trainer.callbacks None"),
        ("trainer: {logger: [true, 3]}", "trainer.logger 3"),
        ("trainer: [3]", "trainer 3"),
        ("model: {init_args: {lr: {a: 1}}}", "model.lr float"),
    ],
)  # fmt: skip
def test_configuration_files(here: Path, text: str, says: str) -> None:
    (here / "bad.yaml").write_text(text)
    refuses(says.split(), cli, "fit", *SMALL, "--config", "bad.yaml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(here: Path) -> None:
    os.mkfifo(here / "pipe.yaml")
    refuses(["pipe.yaml"], cli, "fit", "--config", "pipe.yaml")


def test_merged_keys_and_aliases_are_read(here: Path) -> None:
    (here / "good.yaml").write_text(
        "model:\n  init_args: &base {lr: 1, hidden_sizes: [8]}\n"
        "  class_path: MLPClassifier\n"
        "data: Digits\ntrainer: {<<: {max_epochs: 7, min_epochs: 1}, max_epochs: 3}\n"
    )
    done = succeed("fit", "--config=good.yaml", "--print_config")
    assert "max_epochs: 3" in done.out


def test_missing_model_and_data(here: Path) -> None:
    refuses(["--data", "--model"], cli, "fit")
    refuses(["--data"], cli, "fit", "--model=MLPClassifier")
    late = ("--model.in_features=40", "--model=MLPClassifier")
    refuses(["model", "MLPClassifier"], cli, "fit", *late, "--data=Digits")
    (here / "nine.yaml").touch()
    refuses(["none.yaml", "nine.yaml"], cli, "fit", *SMALL, "--config", "none.yaml")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LN_ZOO_FIT__TRAINER__MAX_EPOCH", "3", "LN_ZOO_FIT__TRAINER__MAX_EPOCHS"),
        ("LN_ZOO_FIT__TRAINER__MAX_EPOCHS", "x", "max_epochs int x"),
        ("LN_ZOO_FIT__MODEL__LR", "0.1", "LN_ZOO_FIT__MODEL__LR --model.lr LN_ZOO_FIT__MODEL="),
        ("LN_ZOO_FIT__OPTIMIZER__LR", "0.1", "LN_ZOO_FIT__OPTIMIZER__LR --optimizer.lr"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    refuses(says.split(), cli, "fit", *SMALL)


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("tset", 2, "tset 'test'"),
        ("analyze invarience", 2, "invarience invariance"),
        ("data iam", 2, "iam iam_ondb"),
        ("draw --nmber 3", 2, "--nmber"),
        ("draw --out a.txt", 1, "--out a.txt"),
        (f"write hi --model x --samples {10**11}", 1, f"--samples {10**11}"),
        (f"sweep --out s --config {QUICKSTART} --norms layer --seeds {HUGE}", 2, f"--seeds {HUGE}"),
        ("draw --model none.ckpt", 1, "none.ckpt"),
        ("draw --import no_such_module", 1, "--import no_such_module"),
        ("write --model handwriting.layernorm", 1, "--file"),
        (f"write hi --model handwriting.layernorm --seed {HUGE}", 1, f"--seed {HUGE}"),
        ("write hi --model handwriting.layernorm --strokes a.txt", 1, "--strokes a.txt"),
        ("write hi --model handwriting.layernorm --prime_text x", 1, "--prime"),
        ("export mlp.none", 2, "--out"),
        ("analyze gradient_flow --norm LayrNorm --data random", 1, "LayrNorm 'LayerNorm'"),
        ("analyze invariance --format word", 2, "--format word markdown"),
        ("analyze trained_dynamics mlp.none", 1, "mlp.none MLPClassifier"),
        ("analyze gradient_flow --data pixels --steps 785", 1, "784 --steps 785"),
        ("analyze gradient_flow --data permuted --batch 70000", 1, "--batch 59999 70000"),
        ("analyze gradient_flow --data pixels --root none", 1, "none"),
        ("analyze invariance --norm no_such.Norm", 1, "no_such.Norm"),
        ("analyze invariance --norm pathlib.Path", 1, "pathlib.Path Norm"),
        ("analyze invariance --factors 2 -1", 1, "factors -1"),
        ("analyze invariance --eps nan", 2, "--eps nan shipped"),
        ("analyze fisher --examples 5", 1, "examples 14 5"),
        ("draw --model draw.nne", 1, "draw.nne draw.none"),
        ("evaluate-sentences majority majority", 1, "majority LABEL=ENCODER"),
        ("evaluate-sentences word-mean", 1, "word-mean:MODEL"),
        ("evaluate-sentences =majority", 1, "=majority"),
        ("evaluate-sentences missing.ckpt", 1, "missing.ckpt"),
        ("evaluate-sentences missing.csv", 1, "missing.csv"),
        ("evaluate-sentences majority --curve curve.csv", 1, "--curve majority"),
        ("analyze", 2, "invariance"),
        ("compare none", 1, "none"),
        ("compare --metric", 2, "--metric"),
        ("evaluate-sentences majorty", 1, "majorty 'majority'"),
        ("evaluate-sentences majority --tasks XX", 1, "XX"),
        ("evaluate-sentences majority --out a.txt", 1, "--out a.txt"),
        ("cards --facts x", 1, "--facts --refresh"),
        ("card none.ckpt --results x --out y", 1, "none.ckpt"),
        ("sweep --out s --model DRAW", 2, "--model fit --"),
        ("reproduce curvature --size huge", 2, "--size huge"),
        ("kernels --biuld", 2, "--biuld"),
        ("list --nrom x", 2, "--nrom"),
    ],
)  # fmt: skip
def test_other_commands(here: Path, given: str, code: int, says: str) -> None:
    refuses(says.split(), cli, *given.split(), code=code)
    assert not list(here.glob("*.*"))


@pytest.mark.parametrize("analysis", ["gradient_flow", "invariance", "fisher", "dynamics"])
def test_files_that_cannot_be_written(here: Path, analysis: str) -> None:
    """Said at once: nothing is measured, printed or written."""
    (here / "folder.png").mkdir()
    (here / "file").write_text("")
    for option, file in (("--out", "name"), ("--out", "table.csv"), ("--out", "folder.png"),
                         ("--out", "file/a.png"), ("--csv", "folder.png")):  # fmt: skip
        refuses([option, file], cli, "analyze", analysis, option, file, code=1)
    assert sorted(path.name for path in here.iterdir()) == ["file", "folder.png"]


def test_models_and_data_that_do_not_fit(here: Path) -> None:
    for model, data in (("MLPClassifier", "SyntheticHandwriting"), ("Handwriting", "Digits")):
        refuses([model, data], cli, "fit", f"--model={model}", f"--data={data}", *QUIET)
    assert not list(here.glob("runs/*/*/*"))


def test_a_monitor_that_nothing_logs(here: Path) -> None:
    stopping = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_los")
    argv = ("fit", *SMALL, *QUIET, "--trainer.max_epochs=1", *stopping)
    refuses(["val_los"], cli, *argv, code=1)


@pytest.mark.parametrize(
    ("command", "lacks", "says"),
    [
        ("fit", ("loops", "callbacks", "optimizer_states", "lr_schedulers"), "loops --weights"),
        ("test", ("pytorch-lightning_version",), "pytorch-lightning_version --weights"),
        ("test", ("state_dict",), "state_dict"),
        ("test", ("hyper_parameters",), "model"),
    ],
)
def test_checkpoints_that_lack_parts(
    here: Path, trained: Path, command: str, lacks: tuple[str, ...], says: str
) -> None:
    whole = torch.load(trained, weights_only=True)
    torch.save({k: v for k, v in whole.items() if k not in lacks}, "other.ckpt")
    argv = (command, "--ckpt_path=other.ckpt", "--data=Digits", *QUIET)
    refuses(["other.ckpt", *says.split()], cli, *argv)


def test_a_file_called_like_a_package(here: Path) -> None:
    (here / "datasets.py").write_text("class Faces: pass")
    argv = ("fit", "--model=MLPClassifier", "--data=datasets.Faces")
    refuses(["datasets", "Faces", "./datasets.py"], cli, *argv)


def test_every_class_is_offered_by_its_name() -> None:
    """Also one that is added later: nothing here lists them."""
    for option, room in (
        ("--model", ln_zoo.models), ("--data", ln_zoo.data), ("--model.norm", ln_zoo.norms)
    ):  # fmt: skip
        line = refuses(["Nonesuch"], cli, "fit", *SMALL, f"{option}=Nonesuch")
        bases = {"--model": "ZooModule", "--data": "LightningDataModule", "--model.norm": "Norm"}
        for name in room.__all__:
            cls = getattr(room, name)
            parents = [c.__name__ for c in getattr(cls, "__mro__", ())[1:]]
            if bases[option] in parents and not inspect.isabstract(cls):
                assert name in line, name


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_DEBUG", "1")
    done = run("fit", *SMALL, "--model.lr=-1")
    assert (done.code, "Traceback" in done.err, "ValueError" in done.err) == (1, True, True)


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [("| true", 141, ""), ("> /dev/full", 1, "No space left"), (">&-", 0, "")],
)
def test_standard_output_that_takes_nothing(redirection: str, code: int, says: str) -> None:
    command = ["bash", "-c", f"set -o pipefail; (sleep 0.1; {SCRIPT} list) {redirection}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == bool(says)


@pytest.mark.parametrize("command", ["cards mlp.none", "reproduce", "kernels"])
def test_standard_output_in_ascii(here: Path, command: str) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = installed(here, *command.split(), **ascii_only)
    assert (done.code, done.err) == (0, "")
    assert done.out
