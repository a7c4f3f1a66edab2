"""Runs commands one after another, each as if in a process of its own, without importing anew.

Reads requests from standard input, a line of JSON each (argv, folder, env, early), and answers on
standard output (code, out, err, raised). The process of the tests is no place for commands: the
classes that other tests define would be among those that short names and error messages know.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback

from ln_zoo.cli import early as early_checks
from ln_zoo.cli import main

# The same two for all commands: log handlers keep the stream that they found when they were made,
# and Lightning makes its own on import, which is the first command's doing.
OUT, ERR = io.StringIO(), io.StringIO()
EARLY = early_checks.check


def answer(argv: list[str], folder: str, env: dict[str, str], early: bool) -> dict[str, object]:
    """Runs one command, and puts back what it changes in this process.

    Without ``early`` mistakes are left to the parser that needs torch and Lightning.
    """
    early_checks.check = EARLY if early else lambda argv: None
    for stream in (OUT, ERR):
        stream.seek(0)
        stream.truncate()
    path, modules = list(sys.path), set(sys.modules)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    code, raised = None, ""
    try:
        with contextlib.redirect_stdout(OUT), contextlib.redirect_stderr(ERR):
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
    return {"code": code, "out": OUT.getvalue(), "err": ERR.getvalue(), "raised": raised}


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to standard output must not be taken for an answer
    for line in sys.stdin:
        channel.write(json.dumps(answer(**json.loads(line))) + "\n")
        channel.flush()
