"""Beside torch alone: layers, norms, kernels and conversion work, and the rest says why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from test_imports import WITHOUT_LIGHTNING

from ln_zoo.packages import _DISTRIBUTIONS

ROOT = Path(__file__).parent.parent
#: torch needs filelock itself.
THERE = {"torch", "numpy", "filelock"}

CODE = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

absent = set(json.loads(sys.argv[1]))

class WithoutThem(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = name.partition(".")[0] not in absent
        return super().find_spec(name, path, target) if known else None

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutThem

import importlib
import torch
for room in json.loads(sys.argv[2]):
    importlib.import_module(f"ln_zoo.{room}")
import ln_zoo
from ln_zoo import GRU, LSTM, BatchNorm, LayerNorm, Linear, WeightNorm, normalize_

found = {}
for norm in (None, LayerNorm(), BatchNorm(), WeightNorm()):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([LSTM(3, 4, norm=norm), GRU(4, 4, norm=norm), Linear(4, 1)])
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        x, losses = torch.randn(6, 8, 3).to(dtype), []
        for _ in range(20):
            h, _ = model[0](x)
            h, _ = model[1](h)
            loss = (model[2](h[-1]).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[f"{norm} {dtype}"] = losses[-1] / losses[0]
        model.eval()
        with torch.no_grad():
            assert model[0](x)[0].dtype == dtype

torch_model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
normalize_(torch_model, LayerNorm())
found["converted"] = type(torch_model[0]).__module__.partition(".")[0]

from ln_zoo.cli import main

for command in (
    ["list"],
    ["kernels"],
    ["fit", "--config", "configs/quickstart.yaml"],
    ["write", "a", "--model", "b"],
):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    found[command[0]] = [code, said.getvalue()]
try:
    ln_zoo.load("mlp.layernorm-digits")
except ImportError as error:
    found["load"] = str(error)
print(json.dumps(found))
"""


def test_torch_alone_is_enough_for_layers() -> None:
    absent = sorted(_DISTRIBUTIONS.keys() - THERE)
    lists = [*absent, "pytorch_lightning"], WITHOUT_LIGHTNING
    command = [sys.executable, "-c", CODE, *map(json.dumps, lists)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    trained = {name: share for name, share in found.items() if " torch." in name}
    assert len(trained) == 8
    assert all(share < 0.5 for share in trained.values()), trained
    assert found["converted"] == "ln_zoo"
    assert found["list"] == found["kernels"] == [0, ""]
    for name, package in (("fit", "PyYAML"), ("write", r"[\w\[\]]+")):
        code, said = found[name]
        assert code == 1
        (line,) = said.splitlines()
        wanted = rf"ln-zoo {name}: error: this needs the package {package}, which is not installed"
        assert re.match(wanted, line), line
        assert "pip install ln-zoo" in line
    assert re.search(r"needs the package \w+, which is not installed", found["load"])


def test_every_dependency_has_its_message() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {Requirement(need).name for need in project["dependencies"]}
    assert needed == {Requirement(name).name for name in _DISTRIBUTIONS.values()}
