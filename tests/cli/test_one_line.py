"""Whatever goes wrong ends in one line and an exit code, never in a traceback."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, SCRIPT, SMALL, environment, run

from ln_zoo.cli import errors

# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--trainer.accumulate_grad_batches=0"],
            "trainer.accumulate_grad_batches: must be at least 1, got 0",
        ),
        (
            ["--trainer.check_val_every_n_epoch=0"],
            "trainer.check_val_every_n_epoch: must be at least 1, got 0",
        ),
        (
            ["--data.batch_size=100000000000000000000000"],
            "data.batch_size: expected a number of at most 9.2e+18, got 1e+23",
        ),
        (
            ["--model.hidden_sizes=[100000000000000000000]"],
            "model.hidden_sizes: expected a number of at most 9.2e+18, got 1e+20",
        ),
        (
            ["--model.norm=LayerNorm", "--model.norm.gain=1e300"],
            "model.norm.gain: expected a number of at most 3.4e+38, got 1e+300",
        ),
        (["--model.lr=nan"], "model.lr: expected a finite number, got nan"),
        (["--model.lr=.nan"], "model.lr: expected a number of at most 3.4e+38, got nan"),
        *(
            (
                [f"--model.norm={given}"],
                "model.norm: expected the name of a class (BatchNorm, Identity, LayerNorm, "
                f"RMSNorm, WeightNorm), or its class_path with init_args, got {shown}",
            )
            for given, shown in (("3", "3"), ("true", "True"), ("[1, 2]", "[1, 2]"))
        ),
    ],
)
def test_values_that_the_parser_would_take(arguments: list[str], message: str) -> None:
    done = run("fit", *SMALL, *arguments)
    assert done.code == 2
    assert done.err.splitlines() == [f"ln-zoo: error: {message}", "options: ln-zoo fit --help"]


def test_help_on_a_part_of_no_model() -> None:
    done = run("fit", "--model.norm.help=LayerNorm")
    assert done.code == 2
    assert done.err.splitlines()[0] == (
        "ln-zoo: error: --model.norm.help=LayerNorm needs a model: give --model NAME before it"
    )


def test_a_configuration_that_nests_too_deeply(here: Path) -> None:
    (here / "deep.yaml").write_text("model: " + "[" * 3000 + "]" * 3000)
    done = run("fit", "--config=deep.yaml")
    assert done.code == 2
    assert done.err == (
        "ln-zoo fit: error: deep.yaml nests lists or mappings too deeply to be read\n"
    )


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            "MLPClassifier",
            "SyntheticHandwriting",
            "MLPClassifier takes labelled images, and SyntheticHandwriting gives handwriting: "
            "choose others with --data or --model",
        ),
        (
            "Handwriting",
            "Digits",
            "Handwriting takes handwriting, and Digits gives labelled images: choose others with "
            "--data or --model",
        ),
    ],
)
def test_a_model_for_other_data(here: Path, model: str, data: str, message: str) -> None:
    done = run("fit", f"--model={model}", f"--data={data}", *QUIET)
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"ln-zoo fit: error: {message}"
    assert not list(here.glob("runs/*/*/*"))


def test_a_monitor_that_nothing_logs(here: Path) -> None:
    done = run(
        "fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val_los",
    )  # fmt: skip
    assert done.code == 1
    assert "ln-zoo fit: error: Early stopping conditioned on metric `val_los`" in done.err
    assert "this is a bug" not in done.err


def test_null_is_the_models_own_norm(here: Path) -> None:
    done = run("fit", *SMALL, *QUIET, "--model.norm=null", "--trainer.fast_dev_run=1")
    assert done.code == 0
    assert (
        "note: model.norm is null, so the model's default, LayerNorm, is used; give Identity for "
        "no normalisation"
    ) in done.err.splitlines()


# Checkpoints


@pytest.mark.parametrize(
    ("command", "change", "message"),
    [
        (
            "fit",
            lambda c: {"state_dict": c["state_dict"], "hyper_parameters": c["hyper_parameters"]},
            "cannot be resumed: it lacks pytorch-lightning_version, epoch, global_step, loops, "
            "callbacks, optimizer_states, lr_schedulers, as if saved with weights only",
        ),
        (
            "test",
            lambda c: {k: v for k, v in c.items() if k != "pytorch-lightning_version"},
            "cannot be read by Lightning: it lacks pytorch-lightning_version, as if saved with "
            "weights only",
        ),
        (
            "test",
            lambda c: torch.zeros(3),
            "is not a readable Lightning checkpoint (no state_dict of tensors): it holds a Tensor",
        ),
        (
            "test",
            lambda c: {"state_dict": [1], "a": 1},
            "is not a readable Lightning checkpoint (no state_dict of tensors): it holds "
            "state_dict",
        ),
    ],
)
def test_checkpoints_of_another_form(
    here: Path, trained: Path, command: str, change: Callable[[dict], object], message: str
) -> None:
    torch.save(change(torch.load(trained, weights_only=True)), "other.ckpt")
    done = run(command, "--ckpt_path=other.ckpt", "--data=Digits", *QUIET)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"ln-zoo {command}: error: other.ckpt {message}")


# Folders of data


def test_a_folder_of_data_that_is_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    for value, what in (("file", "a file"), ("nowhere", "not there")):
        monkeypatch.setenv("LN_ZOO_DATA", value)
        done = run("fit", "--model=MLPClassifier", "--data=MNIST")
        assert done.code == 2
        assert done.err.splitlines()[-1] == (
            f"ln-zoo fit: error: LN_ZOO_DATA={value} must name a folder with a folder mnist, and "
            f"is {what}: correct or unset it, or give --data.root (root= in Python)"
        )


def test_a_table_of_another_kind(here: Path) -> None:
    (here / "file.ckpt").write_bytes(bytes(range(256)))
    (here / "file.csv").write_text("step,val_nll\nx,1\n")
    for name in ("file.ckpt", "file.csv"):
        done = run("compare", f"A={name}", "--metric=val_nll", "--out=a.png")
        assert (done.code, done.err) == (
            1,
            f"ln-zoo compare: error: {name} is not a table of curves: give a run's folder, or its "
            "metrics.csv\n",
        )


def test_a_seed_that_torch_does_not_take(here: Path) -> None:
    done = run("write", "a", "--model=handwriting.layernorm", f"--seed={10**23}")
    assert done.code == 1
    assert done.err == (
        f"ln-zoo write: error: --seed must be between -2**63 and 2**64 - 1, got {10**23}\n"
    )


# Standard output, and errors that are bugs


def test_a_reader_that_goes_away_and_a_full_disk() -> None:
    for redirection, code, told in (
        ("| true", 141, ""),
        (
            "> /dev/full",
            1,
            "ln-zoo list: error: standard output cannot be written: No space left on device\n",
        ),
    ):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; (sleep 0.1; {SCRIPT} list) {redirection}"],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (code, told)


def _raise(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "ln-zoo fit: interrupted\n"),
        (SystemExit(2), 2, ""),
        (ValueError("a\n b"), 1, "ln-zoo fit: error: a; b\n"),
        (
            RuntimeError("no\nException raised from f at x.cpp\nframe 1"),
            1,
            "ln-zoo fit: error: RuntimeError: no (test_one_line.py, line {line}): this is a bug\n"
            "traceback: LN_ZOO_DEBUG=1\n",
        ),
        (
            KeyError("x"),
            1,
            "ln-zoo fit: error: KeyError: 'x' (test_one_line.py, line {line}): this is a bug\n"
            "traceback: LN_ZOO_DEBUG=1\n",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            1,
            "ln-zoo fit: error: DefaultCPUAllocator: can't allocate memory\n"
            "traceback: LN_ZOO_DEBUG=1\n",
        ),
    ],
)
def test_any_error_is_told(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    function = _raise(error)
    assert errors.guarded("fit", function) == code
    line = function.__code__.co_firstlineno + 1
    assert capsys.readouterr().err == told.replace("{line}", str(line))
