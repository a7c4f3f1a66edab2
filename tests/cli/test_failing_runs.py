"""Runs that cannot go on (weights not finite, a full disk, a signal), and that are resumed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from cli_support import DATA, MISHAP, QUIET, SMALL, Patch, cli, last, load, run, same, script
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from refusals import refuses

from ln_zoo.cli import notes, run_output, signals


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
    refuses(["nan.ckpt", "network.1.weight", "not finite"], cli, *argv, code=1)
    assert not [path for path in here.rglob("*") if path.suffix in (".json", ".jsonl", ".csv")]


@pytest.mark.parametrize(
    ("number", "step", "says"),
    [
        (-1, 7, ("not finite", "step 7 (epoch 1)")),
        (-1, 0, ("not finite", "step 0 (epoch 0)")),
        (0, 7, ("No space left",)),
    ],
    ids=["bad loss", "first loss", "full disk"],
)
def test_a_run_that_cannot_go_on_keeps_the_last_good_checkpoint(
    mishap: Path, number: int, step: int, says: tuple[str, ...]
) -> None:
    bad = (f"--trainer.callbacks.step={step}", f"--trainer.callbacks.number={number}")
    more = ("--trainer.max_epochs=3", "--test_after_fit=true", "--trainer.callbacks+=mishap.Mishap")
    kept = [last()] if step else []
    refuses([*says, *kept], cli, "fit", *SMALL, *QUIET, *more, *bad, code=1)
    assert [load(path)["global_step"] for path in mishap.rglob("last.ckpt")] == [5] * len(kept)


def test_what_was_measured_must_be_finite() -> None:
    values = {"test_error": torch.tensor(3)}
    notes.check_finite(values, "the scores of the test")
    values["test_nll"] = torch.tensor(float("inf"))
    refuses("test_nll is not finite: ", notes.check_finite, values, "the scores of the test")


def test_tensorboards_thread_is_quiet(monkeypatch: Patch) -> None:
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
    text = MISHAP.replace("== self.step", "== self.step and trainer.global_rank == 1")
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


# A run that is killed and resumed becomes, to the last bit, what it would have become

#: A checkpoint every 4 of the 10 updates of an epoch, beside last.ckpt after each epoch.
STEPS = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: "at-{step}", every_n_train_steps: 4, save_top_k: -1}
"""
COMMON = [*SMALL, *QUIET, "--data.train_size=200", "--trainer.max_epochs=3"]
#: Killed in the second epoch, the newest checkpoint lies within it, or at the end of the first.
WITHIN = ["--config=steps.yaml", "--model.norm=BatchNorm"]
AT_END = ["--model.norm=LayerNorm"]


def last_of(folder: Path, norm: str, version: int) -> dict:
    return load(folder / last(version, f"MLPClassifier-{norm}"))


def test_killed_and_resumed_equals_uninterrupted(here: Path) -> None:
    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "mishap.py").write_text(MISHAP)
        (folder / "steps.yaml").write_text(STEPS)
    kill = ["--trainer.callbacks+=mishap.Mishap", "--trainer.callbacks.step=17"]
    kill += [f"--trainer.callbacks.number={int(signal.SIGKILL)}"]
    commands = [["fit", *COMMON, *kind] for kind in (WITHIN, AT_END)]
    for command in commands:
        done = script(whole, *command)
        assert done.code == 0, done.err
        done = script(broken, *command, *kill)
        assert done.code == -signal.SIGKILL, done.err
    names = {p.name for p in broken.glob("runs/MLPClassifier-BatchNorm/*/checkpoints/*")}
    assert names == {"last.ckpt", *(f"at-step={step}.ckpt" for step in (4, 8, 12, 16))}
    assert last_of(broken, "BatchNorm", 0)["global_step"] == 10

    told = ""
    for command in commands:
        done = script(broken, *command, "--ckpt_path=last")
        assert done.code == 0, done.err
        told += done.err + done.out
    assert "ignored" not in told
    assert "at-step=16.ckpt" in told  # Lightning says what it restores

    for norm in ("BatchNorm", "LayerNorm"):
        expected, found = last_of(whole, norm, 0), last_of(broken, norm, 1)
        assert found["global_step"] == 30
        for part in ("state_dict", "optimizer_states", "rng_state", "epoch"):
            assert same(found[part], expected[part]), (norm, part)
    assert "network.1.site.running_mean" in last_of(whole, "BatchNorm", 0)["state_dict"]
