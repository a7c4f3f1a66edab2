"""A run that is killed and resumed becomes, to the last bit, what it would have become."""

from __future__ import annotations

import signal
from pathlib import Path

from cli_support import QUIET, SMALL, load, same, script

#: A user's file beside the runs: it kills its process without warning, as a machine that fails.
KILLER = """
import os, signal
from lightning.pytorch import Callback

class Killer(Callback):
    def __init__(self, step: int):
        self.step = step
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
"""
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


def last(folder: Path, norm: str, version: int) -> dict:
    return load(folder / f"runs/MLPClassifier-{norm}/version_{version}/checkpoints/last.ckpt")


def test_killed_and_resumed_equals_uninterrupted(here: Path) -> None:
    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "killer.py").write_text(KILLER)
        (folder / "steps.yaml").write_text(STEPS)
    kill = ["--trainer.callbacks+=killer.Killer", "--trainer.callbacks.step=17"]
    commands = [["fit", *COMMON, *kind] for kind in (WITHIN, AT_END)]
    for command in commands:
        done = script(whole, *command)
        assert done.code == 0, done.err
        done = script(broken, *command, *kill)
        assert done.code == -signal.SIGKILL, done.err
    names = {p.name for p in broken.glob("runs/MLPClassifier-BatchNorm/*/checkpoints/*")}
    assert names == {"last.ckpt", *(f"at-step={step}.ckpt" for step in (4, 8, 12, 16))}
    assert last(broken, "BatchNorm", 0)["global_step"] == 10

    told = ""
    for command in commands:
        done = script(broken, *command, "--ckpt_path=last")
        assert done.code == 0, done.err
        told += done.err + done.out
    assert "ignored" not in told
    assert "at-step=16.ckpt" in told  # Lightning says what it restores

    for norm in ("BatchNorm", "LayerNorm"):
        expected, found = last(whole, norm, 0), last(broken, norm, 1)
        assert found["global_step"] == 30
        for part in ("state_dict", "optimizer_states", "rng_state", "epoch"):
            assert same(found[part], expected[part]), (norm, part)
    assert "network.1.site.running_mean" in last(whole, "BatchNorm", 0)["state_dict"]
