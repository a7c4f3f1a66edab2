"""The command ``ln-zoo``: dispatch to the LightningCLI and to typed functions.

``--version``, ``--help``, ``list`` and ``cards`` do not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from ln_zoo._version import __version__
from ln_zoo.cli import threads
from ln_zoo.cli.errors import report_error, run_command
from ln_zoo.cli.table import COMMANDS, TRAINING
from ln_zoo.utils.packages import require

if TYPE_CHECKING:
    from ln_zoo.cli.arguments import Arguments

_HELP = f"""\
ln-zoo {__version__}: normalised networks for PyTorch Lightning

train and evaluate (LightningCLI; `ln-zoo fit --help`, and `--help_all` for every option)
  ln-zoo fit --config quickstart                    a name of ours, or your file
  ln-zoo fit --config mlp/paper --config norms/batch
  ln-zoo fit --model my_file.MyModule --data ...    any LightningModule
  ln-zoo validate|test|predict --weights mlp.layernorm --data MNIST
  ln-zoo fit --config ... --ckpt_path last          resume the newest run with that name
  ln-zoo sweep --config ... --norms layer,none --seeds 5 --out sweeps/x   a grid of runs, a report
  ln-zoo reproduce [CLAIM] --size reduced           list the paper's claims, or test one
  ln-zoo compare LABEL=RUN ... --out curves.png     learning curves of several runs
  ln-zoo analyze gradient_flow --out flow.png       how far gradients reach back in time
  ln-zoo analyze invariance --eps shipped           Table 1 of the paper for any norm
  ln-zoo analyze fisher                             section 5.2 of the paper, tested
  ln-zoo analyze dynamics                           stability of hidden states, untrained
  ln-zoo analyze trained_dynamics pixels.layernorm  the same of trained models
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
  ln-zoo kernels [--build]                          list the kernels, or build them

environment
  LN_ZOO_DATA        folder with datasets, one folder each (mnist, binarized_mnist, ...)
  LN_ZOO_MODELS      folder with further card folders
  LN_ZOO_HUB         hub account with the weights that are not in the wheel
  LN_ZOO_KERNELS     fast paths to use: names of `ln-zoo kernels`, or 0 for none
  LN_ZOO_CACHE       folder of compiled kernels and parsed data; default ~/.cache/ln_zoo
  LN_ZOO_CUDA_GRAPHS 0 launches GPU kernels one by one; all: see the reference
  LN_ZOO_CPU_LEVEL   level of the CPU kernels, such as x86-64-v3; native compiles them here
  LN_ZOO_CXXFLAGS    further flags of the compiler of kernels
  LN_ZOO_DEBUG       1 shows the traceback of an error
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    ``argv`` excludes the program's name; default: ``sys.argv[1:]``.

    Example:
        >>> main(["--version"])
        ln-zoo ...
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    _find_own_classes()
    threads.shorten_spinning()
    command = argv[0] if argv else "--help"
    if any(name.startswith(f"{command} ") for name in COMMANDS):
        command = " ".join(argv[:2])  # such as `analyze fisher`
    return run_command(command, lambda: _run(command, argv))


def _run(command: str, argv: list[str]) -> int:
    if command in ("--version", "-V"):
        print(f"ln-zoo {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_HELP, end="")
        return 0
    if command in COMMANDS:
        from ln_zoo.cli.commands import call, load

        return call(load(COMMANDS[command]), command, argv[1 + command.count(" ") :])
    if command in TRAINING and argv[1:] in (["--help"], ["-h"]):
        from ln_zoo.cli.short_help import short_help

        print(short_help(command), end="")
        return 0
    if command in TRAINING or command.startswith("--print_completion"):
        argv = ["--help" if word == "--help_all" else word for word in argv]
        given = None
        if command.startswith("--print_completion=shtab"):
            require("shtab")
        if command in TRAINING:
            try:
                given = check_training(argv)
            except (OSError, RecursionError, ValueError) as error:
                return report_error(error, command, code=2)
        from ln_zoo.cli.lightning import run_trainer

        return run_trainer(argv, given)
    return _unknown(command)


def check_training(argv: list[str]) -> Arguments:
    """Reads the options of training, and checks what the parser lets pass.

    Raises:
        OSError: for a file that cannot be read.
        RecursionError: for a configuration that is nested too deeply.
        ValueError: for a configuration that is not valid, or an option that would be ignored.
    """
    from ln_zoo.cli.arguments import Arguments
    from ln_zoo.cli.precheck import check

    given = Arguments(argv)
    given.start()
    check(given)
    return given


def _unknown(command: str) -> int:
    from ln_zoo.utils.names import nearest

    group, _, word = command.partition(" ")
    groups = {name.partition(" ")[0] for name in COMMANDS if " " in name}
    known = [*TRAINING, *COMMANDS]
    if group in groups:
        known = [name for name in COMMANDS if name.startswith(f"{group} ")]
    if word in ("--help", "-h"):
        print(f"commands: {', '.join(known)}; each has --help")
        return 0
    if group in groups and not word:
        print(f"ln-zoo {group}: error: give one of {', '.join(known)}", file=sys.stderr)
        return 2
    near = nearest(command, [*known, *groups])
    print(f"ln-zoo: error: unknown command {command!r}{near}", file=sys.stderr)
    print(f"commands: {', '.join(known)}; `ln-zoo --help` shows examples", file=sys.stderr)
    return 2


def _find_own_classes() -> None:
    """Make classes in the current folder importable, such as ``my_norm.MyNorm``.

    The folder goes last, so that a file ``datasets.py`` there does not hide a package.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        if not {"", here := os.getcwd()} & set(sys.path):
            sys.path.append(here)
