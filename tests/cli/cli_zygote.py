"""Forks a process for each command or piece of code, so that none has to import anything.

Reads requests from standard input, a line of JSON each (argv, code, folder, env, timeout), and
answers on standard output (code, out, err). Without code the command line in argv is run. This
process parses one command first, since the parser caches much, but computes nothing: threads would
be missing in what is forked from it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import signal
import sys
import tempfile
import traceback
import weakref
from pathlib import Path
from typing import NoReturn

import matplotlib.backends.backend_agg  # noqa: F401
import PIL.Image
import quick_pictures

import ln_zoo.cli.lightning  # noqa: F401  # all that a run needs
from ln_zoo.cli import main
from ln_zoo.cli.commands import load
from ln_zoo.cli.table import COMMANDS
from ln_zoo.zoo import reported


def become(request: dict) -> object:
    """Does what a new process of a user would do; returns the exit code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    script, *argv = sys.argv = request["argv"]
    sys.path[0] = str(Path(script).parent) if script != "-c" else ""
    try:
        if request["code"] is None:
            return main(argv)
        exec(request["code"], {"__name__": "__main__", "main": main})
    except SystemExit as error:
        return error.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(code: object) -> NoReturn:
    """Ends as Python would, but frees nothing: to visit every object would copy its memory."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def answer(request: dict) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            signal.alarm(int(request["timeout"]))
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            end(become(request))
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    quick_pictures.leave_out_layout()
    quick_pictures.leave_out_ticks()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else on standard output must not be taken for an answer
    with contextlib.redirect_stdout(io.StringIO()):
        main(["fit", "--model=MLPClassifier", "--data=Digits", "--print_config"])
    # What most commands import or read.
    PIL.Image.preinit()
    reported.reported()
    for command in COMMANDS.values():
        load(command)
    # Children have their own to finalize; freeing what is here would copy its memory.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # a collection in a child would copy all memory
    # Not `for line in sys.stdin`, which reads ahead: a child that ends would rewind what it shares.
    while line := sys.stdin.readline():
        channel.write(json.dumps(answer(json.loads(line))) + "\n")
        channel.flush()
