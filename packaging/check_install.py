"""Check an installed package: ``check_install.py prebuilt`` or ``check_install.py none``.

``prebuilt``: the kernels come from the wheel. ``none``: there are no kernels and no compiler.
Layers train in both cases. In an empty folder, the commands of a first hour work, and each command
and example of the README in the package's metadata.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

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
#: A block of the README is left out if the paragraph before it says this.
NEEDS_CHECKOUT = "from a checkout"
#: Added to the README's commands that train: all runs of a sweep in one process, few batches.
SHORT = "--trainer.limit_train_batches=20 --trainer.limit_val_batches=2"
SHORTENED = {
    "fit": f"{QUIET} {SHORT} --trainer.max_epochs=1",
    "fit --ckpt_path": f"{QUIET} {SHORT} --trainer.max_epochs=2",
    "sweep": f"--pack 100 -- {SHORT} --trainer.limit_test_batches=2 --trainer.max_epochs=1",
}


def main(expected: str) -> None:
    """Exit with an error unless kernels are as expected, layers train and commands work."""
    check_layers(expected)
    # A relative path of the package would no longer be found.
    assert os.path.isabs(ln_zoo.__file__), ln_zoo.__file__
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for command in COMMANDS:
            run(command)
        check_readme(metadata("ln-zoo")["Description"])
        model = ln_zoo.load("mlp.layernorm-digits")
        print(f"loaded {model.card.name}")


def check_readme(readme: str) -> None:
    """Run the README's examples and commands, each of which must succeed."""
    own = os.environ.get("LN_ZOO_DATA")
    mnist = os.environ.get("HF_HUB_OFFLINE") != "1" or (own and Path(own, "mnist").is_dir())
    for paragraph, language, code in blocks(readme):
        title = code.partition("\n")[0]
        if NEEDS_CHECKOUT in paragraph.lower():
            print(f"left out, for checkouts: {title}", flush=True)
        elif "MNIST" in code and not mnist:
            print(f"left out, there is no MNIST: {title}", flush=True)
        elif language == "python":
            with timed(title):
                exec(compile(code, "README.md", "exec"), {})
        elif language == "bash":
            for line in code.splitlines():
                program, command, *options = shlex.split(line)
                assert program == "ln-zoo", f"{line}: say that it is for use {NEEDS_CHECKOUT}"
                kind = f"{command} --ckpt_path" if "--ckpt_path" in options else command
                run(f"{line.partition(' ')[2]} {SHORTENED.get(kind, '')}")


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """The paragraph before each block of a Markdown page, its language and its lines."""
    parts = page.split("```")
    for before, block in zip(parts[::2], parts[1::2], strict=False):
        language, _, code = block.partition("\n")
        yield before.strip().rpartition("\n\n")[2], language, code


def run(command: str) -> None:
    """Run a command of ``ln-zoo``, which must succeed."""
    code = "import sys; from ln_zoo.cli import main; sys.exit(main())"
    with timed(f"ln-zoo {command}"):
        subprocess.run([sys.executable, "-c", code, *shlex.split(command)], check=True)


@contextlib.contextmanager
def timed(title: str) -> Iterator[None]:
    """Print how long it took."""
    start = time.perf_counter()
    yield
    print(f"{title.strip()}: {time.perf_counter() - start:.1f} s", flush=True)


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
