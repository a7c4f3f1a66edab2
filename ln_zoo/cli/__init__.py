"""The command ``ln-zoo``: a light front door before the LightningCLI.

``--version``, ``--help``, ``list`` and ``cards`` answer without importing torch; everything else is
handed on to the part that does the work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from ln_zoo._version import __version__
from ln_zoo.cli import threads
from ln_zoo.cli.errors import guarded, told
from ln_zoo.cli.names import nearest

_HELP = f"""\
ln-zoo {__version__}: normalised networks for PyTorch Lightning

train and evaluate (LightningCLI; `ln-zoo fit --help` lists every option)
  ln-zoo fit --config configs/quickstart.yaml
  ln-zoo fit --config configs/mlp/paper.yaml --config configs/norms/batch.yaml
  ln-zoo validate|test|predict --weights mlp.layernorm --data MNIST
  ln-zoo fit --config ... --ckpt_path last          resume the newest run with that name
  ln-zoo sweep --config ... --norms layer,none --seeds 5 --out sweeps/x   a grid of runs, a report
  ln-zoo reproduce [CLAIM] --size reduced           list the paper's claims, or test one
  ln-zoo compare LABEL=RUN ... --out curves.png     learning curves of several runs
  ln-zoo analyze gradient_flow --out flow.png       how far gradients reach back in time
  ln-zoo analyze invariance --eps shipped           Table 1 of the paper for any norm
  ln-zoo analyze fisher                             section 5.2 of the paper, tested
  ln-zoo analyze dynamics --weights pixels.layernorm   stability of hidden states
  ln-zoo --print_completion=shtab-bash              completion script (or zsh, tcsh, ...)

published models
  ln-zoo list [PATTERN]                             names, sizes, scores
  ln-zoo cards NAME                                 the card of one model
  ln-zoo card CHECKPOINT --results FILE --out DIR   write a card from a checkpoint and its test
  ln-zoo publish NAME --repo_id USER/REPO           upload a card's folder to the hub

export
  ln-zoo export pixels.layernorm --format onnx --form step --out step.onnx   for other runtimes

pictures
  ln-zoo draw --number 25 --out samples.png         samples of a DRAW model
  ln-zoo write "any text" --model handwriting.layernorm --out hello.svg

sentence vectors
  ln-zoo evaluate-sentences MODEL majority          MR, CR, SUBJ, MPQA, SICK, and controls

data
  ln-zoo data iam_ondb SRC DST                      convert the official IAM-OnDB, once

fast paths
  ln-zoo kernels [--build]                          kernels of this machine; build them

environment
  LN_ZOO_DATA        folder with datasets, one folder each (mnist, binarized_mnist, ...)
  LN_ZOO_MODELS      folder with further card folders
  LN_ZOO_HUB         hub account with the weights that the wheel leaves out
  LN_ZOO_KERNELS     fast paths to use: names as `ln-zoo kernels` has them, 0 for none
  LN_ZOO_CACHE       folder of compiled kernels and parsed data; default ~/.cache/ln_zoo
  LN_ZOO_CUDA_GRAPHS 0 launches GPU kernels one by one; all: see the reference
  LN_ZOO_CXXFLAGS    further flags of the compiler of kernels
  LN_ZOO_DEBUG       1 shows the traceback of an error
"""

_TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_ZOO_COMMANDS = ("list", "cards", "card", "publish")
#: Each is the ``main`` of a file here.
_COMMANDS = (
    "sweep",
    "reproduce",
    "compare",
    "analyze",
    "data",
    "draw",
    "write",
    "evaluate-sentences",
    "kernels",
    "export",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: arguments without the program's name; default: those of the process.

    Example:
        >>> main(["--version"])
        ln-zoo ...
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    _find_own_classes()
    threads.shorten_spinning()
    command = argv[0] if argv else "--help"
    # An analysis and a dataset's conversion go by two words.
    name = " ".join(argv[: 2 if command in ("analyze", "data") else 1])
    return guarded(name, lambda: _run(command, argv))


def _run(command: str, argv: list[str]) -> int:
    if command in ("--version", "-V"):
        print(f"ln-zoo {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_HELP, end="")
        return 0
    if command in _ZOO_COMMANDS:
        from ln_zoo.zoo.commands import run

        return run(command, argv[1:])
    if command in _COMMANDS:
        return int(
            importlib.import_module(f"ln_zoo.cli.{command.replace('-', '_')}").main(argv[1:])
        )
    if command in _TRAINER_COMMANDS:
        from ln_zoo.cli import early

        try:
            early.check(argv)
        except (OSError, RecursionError, ValueError) as error:
            return told(error, command, code=2)
    if command in _TRAINER_COMMANDS or command.startswith("--print_completion"):
        from ln_zoo.cli.lightning import run_trainer

        return run_trainer(argv)
    known = [*_TRAINER_COMMANDS, *_ZOO_COMMANDS, *_COMMANDS]
    print(f"ln-zoo: error: unknown command {command!r}{nearest(command, known)}", file=sys.stderr)
    print(f"commands: {', '.join(known)}; `ln-zoo --help` shows examples", file=sys.stderr)
    return 2


def _find_own_classes() -> None:
    """Lets a user's own classes be imported from the current folder, as ``my_norm.MyNorm``.

    The folder goes last: put first, as Python does for ``python my_file.py``, a file there called
    ``datasets.py`` or ``statistics.py`` would be imported in place of the package of that name.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
        if not {"", here := os.getcwd()} & set(sys.path):
            sys.path.append(here)
