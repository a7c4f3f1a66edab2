"""Runs commands and code, each in a process of its own that need not import anything anew.

Reads requests from standard input, a line of JSON each (argv, code, folder, env, timeout), forks,
and answers on standard output (code, out, err). Without code the command line in argv is run. This
process computes nothing: threads would be missing in what is forked from it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

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


def answer(request: dict) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            signal.alarm(int(request["timeout"]))
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                sys.exit(become(request))
            except SystemExit:
                raise
            except BaseException:
                traceback.print_exc()
                sys.exit(1)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to standard output must not be taken for an answer
    # Not `for line in sys.stdin`, which reads ahead: a child that ends would rewind what it shares.
    while line := sys.stdin.readline():
        reply = answer(json.loads(line))
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
