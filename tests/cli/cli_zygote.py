"""Runs commands and code, each in a process of its own that need not import anything anew.

Reads requests from standard input, a line of JSON each, and forks. A request with a ``socket``
becomes a server of quick commands there (see `cli_server`), at once. Any other (argv, code, folder,
env, timeout) is run to its end, and answered on standard output (code, out, err); without code
the command line in argv is run. This process computes nothing: threads would be missing in what
is forked from it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import cli_server
import quick_pictures
import sklearn.datasets  # noqa: F401  # the digits, which most tests train on

import ln_zoo.cli.lightning  # noqa: F401  # all that a run needs
from ln_zoo.cli import main


def become(request: dict) -> int:
    """What a new process of a user would do."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    script, *argv = sys.argv = request["argv"]
    sys.path[0] = str(Path(script).parent) if script != "-c" else ""
    if request["code"] is None:
        return main(argv)
    exec(request["code"], {"__name__": "__main__", "main": main})
    return 0


def end_after(run: Callable[[], int]) -> NoReturn:
    """Runs it and ends as Python would, but frees nothing: to visit every object is to copy the
    memory of all, which takes longer than most commands."""
    code: object = 1
    try:
        code = run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
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
            end_after(lambda: become(request))
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


def serve(path: str) -> None:
    if os.fork() == 0:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(path)
            end_after(lambda: cli_server.serve(channel))


if __name__ == "__main__":
    quick_pictures.leave_out_layout()
    quick_pictures.leave_out_ticks()
    gc.freeze()  # a collection in a child would copy what it only looks at
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to standard output must not be taken for an answer
    # Not `for line in sys.stdin`, which reads ahead: a child that ends would rewind what it shares.
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "socket" in request:
            serve(request["socket"])
            continue
        channel.write(json.dumps(answer(request)) + "\n")
        channel.flush()
