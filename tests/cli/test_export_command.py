"""``ln-zoo export``: what it writes and says, and how it fails."""

from __future__ import annotations

import torch

from ln_zoo.cli import main


def test_a_published_model(tmp_path, capsys):
    file = tmp_path / "digits.pt2"
    command = ["export", "mlp.layernorm-digits", "--format", "pt2", "--form", "sequence"]
    assert main([*command, "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "images (N, 64)" in said
    assert "logits" in said
    assert "largest difference from the model: " in said
    assert "N=4, T=12" in said
    assert torch.export.load(file).module()(torch.rand(9, 64))[0].shape == (9, 10)
    assert main([*command, "--out", str(file)]) == 1
    assert "exists" in capsys.readouterr().err


def test_errors_are_one_line_and_leave_no_file(tmp_path, capsys):
    for arguments, message in (
        (["--form", "step"], "MLPClassifier has no step form: nothing recurrent leads"),
        (["--format", "onnx", "--opset", "9"], "opset must be from 18 to 23, got 9"),
        (["--format", "keras"], "got 'keras'"),
    ):
        command = ["export", "mlp.layernorm-digits", "--format", "pt2", *arguments]
        assert main([*command, "--out", str(tmp_path / "a.pt2")]) == 1
        said = capsys.readouterr().err.strip()
        assert message in said
        assert "\n" not in said
    assert not list(tmp_path.iterdir())
