"""Runs as jobs of SLURM, by submitit."""

from __future__ import annotations

import logging
import os
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
#: Exit code of a run that was stopped by SIGTERM, as before its time limit.
_STOPPED = 143
#: Seconds before the time limit at which runs write their checkpoints.
_NOTICE = 120


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
            with self.executor.batch():
                for command in commands:
                    whole = replace(command, out=command.out.absolute())
                    jobs.append(self.executor.submit(run_in_job, whole, os.getcwd()))
        except submitit.core.utils.FailedJobError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if "error" in line), lines[0])
            raise SweepError(f"--slurm: {said}: correct the options of sbatch") from error
        return [_Job(job) for job in jobs]


class _Job(Handle):
    def __init__(self, job: Any) -> None:
        self.job = job
        self._why = ""

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if not self.job.paths.result_pickle.exists():
            state = self.job.state
            self.interrupted = state.startswith(_INTERRUPTED)
            self._why = f"job {self.job.job_id} ended as {state} (its log: {self.job.paths.stderr})"
            return 1
        if error := self.job.exception():
            self._why = str(error).strip().splitlines()[-1]
            return 1
        code: int = self.job.result()
        self.interrupted = code == _STOPPED and not self.job.state.startswith("CANCELLED")
        return code

    @property
    def why(self) -> str:
        return self._why

    def stop(self) -> None:
        self.job.cancel(check=False)

    def kill(self) -> None:
        self.job.cancel(check=False)
