"""Runs that cannot go on: weights that are not finite, a full disk, a signal."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from cli_support import QUIET, SMALL, fails, last, load, run, script
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from ln_zoo.cli import notes, run_output, signals

DATA = SMALL[2:]
#: A user's file: the disk is full at the seventh update, or a signal comes then, or NaN.
MISHAP = """
import errno, os, signal
from lightning.pytorch import Callback

class Mishap(Callback):
    def __init__(self, number: int = 0):
        self.number = number
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 7:
            if not self.number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.number < 0:
                next(trainer.model.parameters()).data.fill_(float("nan"))
            else:
                os.kill(os.getpid(), self.number)
    def on_test_batch_start(self, *args):
        os.kill(os.getpid(), self.number)
"""


@pytest.fixture
def mishap(here: Path) -> Path:
    (here / "mishap.py").write_text(MISHAP)
    return here


@pytest.mark.parametrize("command", ["test", "validate", "predict", "fit"])
def test_weights_that_are_not_finite(trained: Path, here: Path, command: str) -> None:
    checkpoint = load(trained)
    checkpoint["state_dict"]["network.1.weight"][2, 3] = float("nan")
    torch.save(checkpoint, here / "nan.ckpt")
    argv = (command, "--weights=nan.ckpt", *DATA, *QUIET)
    fails(*argv, code=1, says=["nan.ckpt", "network.1.weight", "not finite"])
    assert not [path for path in here.rglob("*") if path.suffix in (".json", ".jsonl", ".csv")]


def test_what_was_measured_must_be_finite() -> None:
    values = {"test_nll": torch.tensor(float("inf")), "test_error": torch.tensor(3)}
    with pytest.raises(ValueError, match="test_nll is not finite: "):
        notes.check_finite(values, "the scores of the test")
    notes.check_finite({"test_error": torch.tensor(3)}, "the scores of the test")


def test_a_disk_that_fills_while_training(mishap: Path) -> None:
    more = ("--trainer.max_epochs=2", "--trainer.callbacks+=mishap.Mishap")
    fails("fit", *SMALL, *QUIET, *more, code=1, says=["No space left", last()])
    assert load(last())["global_step"] == 5


def test_tensorboards_thread_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: printed.append(failed.exc_value))

    def fail() -> None:
        raise OSError(28, "No space left on device")

    class Writer(threading.Thread):
        pass

    for module, said in (("tensorboard.summary.writer", 0), ("of_a_user", 1)):
        Writer.__module__ = module
        with run_output.quiet_writers():
            thread = Writer(target=fail)
            thread.start()
            thread.join()
        assert len(printed) == said


@pytest.mark.parametrize(("number", "code", "name"), [(15, 143, "SIGTERM"), (2, 130, "SIGINT")])
def test_a_signal_ends_in_one_line(mishap: Path, number: int, code: int, name: str) -> None:
    more = ["--trainer.callbacks+=mishap.Mishap", f"--trainer.callbacks.number={number}"]
    for argv, says in ((["fit", *SMALL], last()), (["test", "--ckpt_path", last(), *DATA], "")):
        done = run(*argv, *QUIET, *more)
        line = done.err.splitlines()[-1]
        assert (done.code, name in line, str(says) in line) == (code, True, True), done.err
    assert load(last())["global_step"] == 8


def test_lightning_requeues_no_job_of_slurm(here: Path) -> None:
    """Its handler saves within the handler, where processes may be at different updates."""
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        plugins=[SLURMEnvironment(auto_requeue=True)],
    )  # fmt: skip
    signals.prepare(trainer)
    connector = trainer._signal_connector
    connector.register_signal_handlers()
    try:
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        connector.teardown()


def test_a_process_that_is_lost() -> None:
    reset = "[/gloo/transport/tcp/pair.cc:537] Read error [::1]:25254: Connection reset by peer"
    for error in (RuntimeError(reset), torch.distributed.DistBackendError("NCCL error")):
        assert isinstance(signals.lost_process(error), ConnectionError)
    assert signals.lost_process(RuntimeError("shapes differ")) is None
    assert signals.lost_process(ValueError(reset)) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, -1])
def test_a_mishap_of_one_of_two_processes(here: Path, number: int) -> None:
    text = MISHAP.replace("global_step == 7", "global_step == 7 and trainer.global_rank == 1")
    (here / "mishap.py").write_text(text)
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    more = ["--trainer.callbacks+=mishap.Mishap", f"--trainer.callbacks.number={int(number)}"]
    arguments = [*SMALL, *QUIET, "--data.train_size=200", "--trainer.max_epochs=3", *two, *more]
    done = script(here, "fit", *arguments)
    assert "Traceback" not in done.err
    assert load(last())["global_step"] == (8 if number == signal.SIGTERM else 5)
    if number == signal.SIGTERM:
        assert (done.code, done.err.count("stopped by SIGTERM")) == (143, 1)
    elif number == signal.SIGKILL:
        assert done.code in (1, -signal.SIGKILL)  # the other process, or Lightning's watch
    else:
        assert done.code == 1
        assert [x for x in ("step 7 (epoch 1)", str(last())) if x not in done.err] == []
