"""Runs as tasks of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.launchers.base import Command, Handle, Launcher, run_in_job
from ln_zoo.utils.errors import first_line

#: How often Ray starts a run again whose worker or node is lost.
_RETRIES = 3
#: Seconds to wait for a cluster's answer.
_PATIENCE = 5.0


class RayLauncher(Launcher):
    """Starts runs as tasks of the cluster at ``RAY_ADDRESS``, else of this machine.

    A task asks for ``threads`` CPUs and ``gpus`` GPUs, which may be a fraction.

    Raises:
        SweepError: if Ray is not installed, or no cluster answers at its address.
    """

    def __init__(self, threads: int, gpus: float) -> None:
        try:
            import ray
        except ImportError:
            raise SweepError(
                "--launcher ray needs the package ray: pip install 'ln-zoo[ray]'"
            ) from None
        _check_cluster(os.environ.get("RAY_ADDRESS", ""))
        self.ray = ray
        self.task: Any = ray.remote(num_cpus=max(threads, 1), num_gpus=gpus, max_retries=_RETRIES)(
            run_in_job
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        try:
            self.ray.init(
                log_to_driver=False, logging_level=logging.CRITICAL, include_dashboard=False,
                configure_logging=False,
            )  # fmt: skip
        except Exception as error:  # of no common class; a busy machine gives an Exception itself
            raise _no_cluster(first_line(error)) from error
        try:
            yield
        finally:
            self.ray.shutdown()

    def start(self, command: Command) -> Handle:
        whole = replace(command, out=command.out.absolute())
        return _Task(self.ray, self.task.remote(whole, os.getcwd()))


def _check_cluster(address: str) -> None:
    """Raises SweepError if nothing answers at HOST:PORT; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(str(error)) from error


def _no_cluster(why: str) -> SweepError:
    if address := os.environ.get("RAY_ADDRESS"):
        return SweepError(
            f"no Ray at RAY_ADDRESS={address!r} ({why}): correct it, or unset it for this machine"
        )
    return SweepError(f"Ray does not start here ({why}): try again, or give --launcher local")


class _Task(Handle):
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray = ray
        self.reference = reference
        self._why = ""

    def poll(self) -> int | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            code: int = self.ray.get(self.reference)
        except self.ray.exceptions.RayError as error:
            self._why = f"Ray: {first_line(error)}"
            return 1
        return code

    @property
    def why(self) -> str:
        return self._why

    def stop(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.cancel(self.reference, force=True)
