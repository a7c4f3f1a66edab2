"""Check an installed package: ``check_install.py prebuilt`` or ``check_install.py none``.

``prebuilt``: the kernels come from the wheel. ``none``: there are no kernels and no compiler.
Layers train in both cases, and the commands of a first hour work in an empty folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import torch

import ln_zoo
from ln_zoo import GRU, LSTM, RNN, LayerNorm
from ln_zoo.kernels.native import build

QUIET = "--trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
#: Without downloads.
COMMANDS = (
    f"fit --config quickstart {QUIET}",
    "test --weights mlp.layernorm-digits --data Digits",
    f"sweep --config quickstart --norms layer,none --seeds 1 --out sweep -- {QUIET}",
    "reproduce --recompute",
    "reproduce invariance",
    "reproduce small-batches --size reduced --print",
    "list",
)


def main(expected: str) -> None:
    """Exit with an error unless kernels are as expected, layers train and commands work."""
    check_layers(expected)
    check_commands()


def check_commands() -> None:
    """Run commands in an empty folder; each must succeed."""
    code = "import sys; from ln_zoo.cli import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        # Not in that folder: a relative path of the package would no longer be found.
        assert os.path.isabs(ln_zoo.__file__), ln_zoo.__file__
        for command in COMMANDS:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, *command.split()], cwd=folder, check=True)
            print(f"ln-zoo {command}: {time.perf_counter() - start:.1f} s", flush=True)
        model = ln_zoo.load("mlp.layernorm-digits")
        print(f"loaded {model.card.name}")


def check_layers(expected: str) -> None:
    """Exit with an error unless the kernels are as expected and layers train."""
    layer, x = LSTM(40, 128, norm=LayerNorm()), torch.randn(50, 8, 40)
    start = time.perf_counter()
    layer(x)
    first = time.perf_counter() - start
    known = build.status()
    print(f"ln_zoo {ln_zoo.__version__}, torch {torch.__version__}, Python {sys.version}")
    print(f"kernels: {known.path or known.reason} (level {known.level}, OpenMP {known.openmp})")
    print(f"first call: {first:.3f} s")
    if (expected == "prebuilt") != known.prebuilt:
        raise SystemExit(f"expected kernels: {expected}, found: {known}")
    if known.prebuilt and known.openmp != "torch's":
        print("warning: the kernels run on one thread")
    for made in (LSTM, GRU, RNN):
        layer = made(5, 7, norm=LayerNorm()).double()
        single = made(5, 7, norm=LayerNorm())
        single.load_state_dict(layer.state_dict())
        layer.load_state_dict(single.state_dict())
        inputs = torch.randn(6, 3, 5)
        results = []
        for module in (layer, single):
            output, _ = module(inputs.to(next(module.parameters()).dtype))
            output.square().sum().backward()
            results.append([output, *(p.grad for p in module.parameters())])
        for exact, found in zip(*results, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1])
