"""Runs commands one after another, each as if in a process of its own, without importing anew.

Reads requests from a socket, a line of JSON each (argv, folder, env), and answers there
(code, out, err, raised). The process of the tests is no place for commands: the classes that other
tests define would be among those that short names and error messages know.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from typing import BinaryIO

from ln_zoo.cli import main


def answer(argv: list[str], folder: str, env: dict[str, str]) -> dict[str, object]:
    """Runs one command, and puts back what it changes in this process."""
    path, modules = list(sys.path), set(sys.modules)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    code, raised = None, ""
    try:
        code = main(argv)
    except Exception:
        raised = traceback.format_exc()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        # A user's own files have the same names in many folders; the package has not, even where it
        # lies in the folder that a command ran in.
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith(folder) and name.partition(".")[0] != "ln_zoo":
            del sys.modules[name]
    return {"code": code, "raised": raised}


def written(file: BinaryIO) -> str:
    """What a command wrote to a file, which is empty afterwards."""
    file.seek(0)
    text = file.read().decode()
    file.seek(0)
    file.truncate()
    return text


def serve(channel: socket.socket) -> int:
    """Answers until the other end is closed."""
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        channel.makefile("rw") as lines,
    ):
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        while line := lines.readline():
            reply = answer(**json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            lines.write(json.dumps(reply | {"out": written(out), "err": written(err)}) + "\n")
            lines.flush()
    return 0
