"""Runs as processes of this machine."""

from __future__ import annotations

import subprocess

from ln_zoo.sweeps.launchers.base import Command, Handle, Launcher


class LocalLauncher(Launcher):
    """Starts processes on this machine."""

    runs_at_once = True

    def start(self, command: Command) -> Handle:
        return _Process(command.start())


class _Process(Handle):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
