"""``ln-zoo export``: what it writes and prints, and how it fails."""

from __future__ import annotations

from pathlib import Path

import torch
from cli_support import Capture, cli, told
from refusals import refuses

COMMAND = ("export", "mlp.layernorm-digits", "--format=pt2", "--form=sequence", "--out=a.pt2")


def test_a_published_model(here: Path, capsys: Capture) -> None:
    printed = told(capsys, *COMMAND)
    for words in ("images (N, 64)", "logits", "largest difference from the model: ", "N=4, T=12"):
        assert words in printed
    assert torch.export.load("a.pt2").module()(torch.rand(9, 64))[0].shape == (9, 10)
    refuses(["a.pt2", "exists"], cli, *COMMAND, code=1)


def test_errors_leave_no_file(here: Path) -> None:
    for given, says in (
        ("--form=step", "MLPClassifier step"),
        ("--format=onnx --opset=9", "opset 9 18 23"),
        ("--format=keras", "'keras'"),
    ):
        refuses(says.split(), cli, *COMMAND, *given.split(), code=1)
    assert not list(here.iterdir())
