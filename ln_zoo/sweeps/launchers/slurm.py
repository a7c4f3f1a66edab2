"""Runs as jobs of SLURM, by submitit."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.launchers.base import Command, Handle, Launcher, run_in_job

#: Folder of submitit's files, in the sweep's.
_FOLDER = ".slurm"
#: States of jobs that SLURM itself has ended.
_INTERRUPTED = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")
#: Reasons for which SLURM keeps a job in its queue until its options or the cluster change.
_NEVER = ("BadConstraints", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
#: Exit code of a run that was stopped by SIGTERM, as before its time limit.
_STOPPED = 143
#: Seconds before the time limit at which runs write their checkpoints.
_NOTICE = 120
#: Seconds between two looks at the queue.
_LOOK_EVERY = 30.0


class SlurmLauncher(Launcher):
    """Submits runs as one array of jobs, ``jobs`` of which run at a time.

    ``options`` are those of sbatch. ``cluster=local`` among them starts the jobs on this machine at
    once, by submitit's local executor, to try things out.

    Raises:
        SweepError: if submitit is not installed, or this machine has no SLURM.
    """

    queues = True
    resubmits = True
    pause = 2.0

    def __init__(
        self, out: Path, jobs: int, threads: int, gpus: float, options: Mapping[str, str]
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise SweepError(
                "--launcher slurm needs the package submitit: pip install 'ln-zoo[slurm]'"
            ) from None
        if gpus != int(gpus):
            raise SweepError(f"--gpus {gpus:g}: SLURM gives whole GPUs; use --launcher ray, or 1")
        sbatch = {name.replace("-", "_"): value for name, value in options.items()}
        cluster = sbatch.pop("cluster", "slurm")
        folder = (out / _FOLDER).absolute()
        logging.getLogger("submitit").setLevel(logging.CRITICAL)
        self.executor: Any
        self.squeue: _Squeue | None = None
        if cluster == "local":
            self.executor = submitit.LocalExecutor(folder)
            self.executor.update_parameters(timeout_min=60 * 24)
            return
        if cluster != "slurm":
            raise SweepError(f"--slurm cluster must be slurm or local, got {cluster}")
        if submitit.SlurmExecutor.affinity() <= 0:
            raise SweepError(
                "--launcher slurm: there is no srun here: start the sweep where sbatch works, or "
                "give --slurm cluster=local to try it on this machine"
            )
        sbatch = {"signal": f"TERM@{_NOTICE}", "cpus_per_task": str(max(threads, 1))} | sbatch
        if gpus:
            sbatch = {"gpus_per_node": str(int(gpus))} | sbatch
        # The default of submitit looks for jobs that were killed every ten minutes.
        submitit.SlurmJob.watcher = type(submitit.SlurmJob.watcher)(delay_s=60)
        self.squeue = _Squeue()
        self.executor = submitit.SlurmExecutor(folder)
        self.executor.update_parameters(
            job_name=out.absolute().name,
            time=None,  # the partition's default, or that of the options
            array_parallelism=jobs,
            additional_parameters=sbatch,
        )

    def start(self, command: Command) -> Handle:
        return self.start_all([command])[0]

    def start_all(self, commands: Sequence[Command]) -> list[Handle]:
        if not commands:
            return []
        import submitit

        jobs = []
        try:
            # submitit repeats what sbatch prints.
            with contextlib.redirect_stderr(io.StringIO()), self.executor.batch():
                for command in commands:
                    whole = replace(command, out=command.out.absolute())
                    jobs.append(self.executor.submit(run_in_job, whole, os.getcwd()))
        except submitit.core.utils.FailedJobError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if "error" in line), lines[0])
            raise SweepError(f"--slurm: {said}: correct the options of sbatch") from error
        return [_Job(job, self.squeue) for job in jobs]


class _Squeue:
    """Jobs in the queue: where SLURM keeps no accounts, submitit waits for killed jobs forever.

    Prints one note for each reason for which the queue keeps jobs forever.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._when = -math.inf
        self._reasons: dict[str, str] | None = None
        self._noted: set[str] = set()

    def lacks(self, job: str) -> bool:
        if time.monotonic() - self._when > _LOOK_EVERY:
            argv = ["squeue", "--noheader", "--array", "--me", "--format=%i %r"]
            done = subprocess.run(argv, capture_output=True, text=True)
            lines = [line.partition(" ") for line in done.stdout.splitlines()]
            found = {name: reason for name, _, reason in lines}
            self._reasons = found if done.returncode == 0 else None
            self._when = time.monotonic()
            self.looks += 1
        reason = (self._reasons or {}).get(job, "")
        if reason in _NEVER and reason not in self._noted:
            self._noted.add(reason)
            print(
                f"note: SLURM holds job {job} for {reason}: no node of the partition fits the "
                "options, so it waits until they change. Stop the sweep and correct --slurm",
                file=sys.stderr,
            )
        return self._reasons is not None and job not in self._reasons


class _Job(Handle):
    def __init__(self, job: Any, squeue: _Squeue | None) -> None:
        self.job = job
        self.squeue = squeue
        self._missed: set[int] = set()
        self._why = ""

    def poll(self) -> int | None:
        if not self.job.done() and not self._is_lost():
            return None
        if not self.job.paths.result_pickle.exists():
            state = self.job.state
            self.interrupted = state.startswith((*_INTERRUPTED, "UNKNOWN"))
            self._why = f"job {self.job.job_id} ended as {state} (its log: {self.job.paths.stderr})"
            return 1
        if error := self.job.exception():
            self._why = str(error).strip().splitlines()[-1]
            return 1
        code: int = self.job.result()
        self.interrupted = code == _STOPPED and not self.job.state.startswith("CANCELLED")
        return code

    def _is_lost(self) -> bool:
        """Whether two looks in a row found the job neither queued nor with a result."""
        if self.squeue is None or not self.squeue.lacks(self.job.job_id):
            self._missed.clear()
        else:
            self._missed.add(self.squeue.looks)
        return len(self._missed) > 1

    @property
    def why(self) -> str:
        return self._why

    def stop(self) -> None:
        self.job.cancel(check=False)

    def kill(self) -> None:
        self.job.cancel(check=False)
