"""Runs as tasks of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.launchers.base import Command, Handle, Launcher, run_in_job

#: How often Ray starts a run again whose worker or node is lost.
_RETRIES = 3


class RayLauncher(Launcher):
    """Starts runs as tasks of the cluster at ``RAY_ADDRESS``, else of this machine.

    A task asks for ``threads`` CPUs and ``gpus`` GPUs, which may be a fraction.

    Raises:
        SweepError: if Ray is not installed.
    """

    def __init__(self, threads: int, gpus: float) -> None:
        try:
            import ray
        except ImportError:
            raise SweepError(
                "--launcher ray needs the package ray: pip install 'ln-zoo[ray]'"
            ) from None
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
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS", "")
            first = str(error).strip().splitlines()[0]
            raise SweepError(
                f"no Ray at RAY_ADDRESS={address!r}: {first} Correct it, or unset it to use this "
                "machine"
            ) from error
        try:
            yield
        finally:
            self.ray.shutdown()

    def start(self, command: Command) -> Handle:
        whole = replace(command, out=command.out.absolute())
        return _Task(self.ray, self.task.remote(whole, os.getcwd()))


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
            self._why = f"Ray: {str(error).strip().splitlines()[0]}"
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
