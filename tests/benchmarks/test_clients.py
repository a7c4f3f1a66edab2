"""The table of other libraries' layers: placeholders, skipping, and a run with a stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import rows_of
from torch import Tensor, nn

from benchmarks import clients
from benchmarks.contestants import Absent, Size

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

LIBRARY = """
import missing.part as part
from missing import Base, decorated, try_import
from missing.other import Kind
from library.near import nothing

torch, nn = try_import()

class GRU(Base, nn.Module):
    @decorated()
    def forward(self, x: Kind["a"]) -> part.Output:
        return self.gru(x)

    def __init__(self, size, hidden):
        nn.Module.__init__(self)
        self.gru = nn.GRU(size, hidden)
"""


@pytest.fixture
def packages(tmp_path: Path) -> clients.Packages:
    folder = tmp_path / "library==1.0" / "library"
    folder.mkdir(parents=True)
    (folder / "rnn.py").write_text(LIBRARY)
    (folder.parent / "done").touch()
    return clients.Packages(tmp_path)


def make(packages: clients.Packages, size: Size) -> nn.Module:
    found = packages.load("library.rnn", missing={"try_import": lambda: (torch, nn)})
    return found.GRU(size.I, size.H)


def client(convert: Any) -> clients.Client:
    size = Size(5, 2, 16, 24)
    return clients.Client(("library==1.0",), make, size, lambda module, x: module(x), convert)


def test_a_file_is_imported_without_what_it_needs_beside_torch(packages: clients.Packages) -> None:
    layer = make(packages, Size(5, 2, 3, 4))
    assert layer(torch.zeros(5, 2, 3))[0].shape == (5, 2, 4)
    with pytest.raises(ImportError):
        __import__("missing")
    with pytest.raises(Absent, match=r"library\.other"):
        packages.load("library.other")


def test_errors_and_times_of_a_stand_in(
    packages: clients.Packages, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(clients, "CLIENTS", {"stand-in": client(clients._normalized)})
    x = torch.randn(3, 2, 4)
    layers = nn.ModuleDict({"rnn": nn.GRU(4, 5)})
    whole = clients.Model((), lambda _: layers, {"x": lambda m: m["rnn"](x)})
    monkeypatch.setattr(clients, "MODELS", {"whole": whole})
    table = tmp_path / "times.csv"
    threads = torch.get_num_threads()
    clients.main(["--folder", str(packages.folder), "--rounds", "1", "--csv", str(table)])
    torch.set_num_threads(threads)
    assert "stand-in" in capsys.readouterr().out
    rows = rows_of(table)
    assert [row["mode"] for row in rows] == ["infer", "train"] * 2
    assert [row["client"] for row in rows[2:]] == ["whole, x"] * 2
    assert all(float(row["ours"]) > 0 for row in rows)


def test_a_difference_is_seen(packages: clients.Packages) -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module, weight: bool) -> None:
            super().__init__()
            self.gru, self.weight = inner.get_submodule("gru"), weight

        def forward(self, x: Tensor) -> Any:
            output, state = self.gru(x)
            if not self.weight:
                return 1.001 * output, state
            bias: Any = self.gru.bias_ih_l0
            return output + (bias - bias.detach()).sum(), state

    size = Size(5, 2, 3, 4)
    output, weight = (
        clients.errors(client(lambda module, of=of: Doubled(module, of)), packages, size)
        for of in (False, True)
    )
    assert output.outputs == pytest.approx(1e-3, rel=0.5)
    assert weight.outputs < 1e-12 < 1e-3 < weight.weight_gradients


def test_a_library_that_cannot_be_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(clients, "CLIENTS", {"stand-in": client(clients._normalized)})
    clients.main(["--folder", str(tmp_path), "--rounds", "0"])
    printed = capsys.readouterr().out
    assert "stand-in: skipped" in printed
    assert "library==1.0: ERROR: no network" in printed
