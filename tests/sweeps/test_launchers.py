"""The launchers of a sweep: SLURM by submitit, on a cluster of a few lines, and Ray.

The runs here are a few lines of Python that leave what a run leaves.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweep_runs import refuses

from ln_zoo.sweeps.grid import Grid
from ln_zoo.sweeps.launchers import launcher_of, parse_slurm
from ln_zoo.sweeps.launchers.base import Command, Launcher
from ln_zoo.sweeps.progress import Watcher
from ln_zoo.sweeps.queue import Queue
from ln_zoo.sweeps.state import FAILED, FINISHED, state_of

ROOT = Path(__file__).parents[2]
GRID = Grid(configs=["c.yaml"], norms=["a.yaml", "b.yaml"], seeds=[0, 1], data_seed=False)

#: In place of a run. The file ``how`` in its folder makes it end early, once.
FAKE = """
import json, os, pathlib, signal, sys, time
from ln_zoo.cli.sweep.worker import _ParentWatcher
out, name = (a.partition("=")[2] for a in sys.argv[2:4])
folder = pathlib.Path(out, name)
how = (folder / "how").read_text() if (folder / "how").exists() else ""
if how == "long":
    (folder / "draft").write_text(str(os.getpid()))
    (folder / "draft").rename(folder / "pid")
    _ParentWatcher().start()
    time.sleep(60)
if how in ("143", "1"):
    (folder / "how").unlink()
    (folder / "metrics.csv").write_text("epoch,step\\n0,9\\n")
    sys.exit(int(how))
(folder / "test_results.json").write_text(json.dumps({"metrics": {"error": 0.5}}))
"""

#: A cluster: `sbatch` starts all jobs of a script at once. Its options and arrays are noted.
CLUSTER = {
    "sbatch": """
import os, pathlib, re, subprocess, sys
script = pathlib.Path(sys.argv[1]).read_text()
here = pathlib.Path(__file__).parent
with (here / "scripts").open("a") as file: file.write(script)
job = str((here / "scripts").read_text().count("#!/bin/bash"))
if "partition=none" in script:
    sys.exit("sbatch: error: invalid partition specified: none")
array = re.search(r"--array=0-(\\d+)", script)
for task in range(int(array[1]) + 1) if array else [None]:
    ids = {"SLURM_JOB_ID": job} | ({} if task is None else
        {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(task)})
    rest = {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
    rest |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "here"}
    subprocess.Popen(["bash", "-c", script], env=os.environ | ids | rest,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(f"Submitted batch job {job}")
""",
    "srun": """
import os, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words = words[1:] if words[0] == "--unbuffered" else words[2:]
os.execv(words[0], words)
""",
    "sacct": 'print("JobID|State|NodeList")\n',
    "scancel": "",
    "squeue": 'print("80_0")\n',
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep's folder, whose runs are `FAKE` in the engines' processes too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nimport ln_zoo.sweeps.launchers.base as base\n"
        f"base.PYTHON = [sys.executable, '-c', {FAKE!r}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(Launcher, "pause", 0.05)
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in CLUSTER.items():
        path = folder / name
        path.write_text(f"#!{sys.executable} -S\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def end_as(out: Path, name: str, how: str) -> None:
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "how").write_text(how)


def kinds(out: Path) -> list[str]:
    return [state_of(out / run.name).kind for run in GRID.runs()]


@pytest.mark.parametrize("engine", ["slurm", "ray"])
def test_engines_are_extras(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(f"ln-zoo\\[{engine}\\]", launcher_of, engine, tmp_path, 1, 1)


def test_options_of_other_launchers(tmp_path: Path) -> None:
    refuses("--slurm", launcher_of, "local", tmp_path, 1, 1, slurm=["time=1"])
    refuses("--gpus", launcher_of, "local", tmp_path, 1, 1, gpus=1)
    for text in ("time", "time=", "=1", "a=1,b"):
        refuses("--slurm", parse_slurm, [text])


def test_options_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses("srun", launcher_of, "slurm", tmp_path, 1, 1)
    refuses("0.5", launcher_of, "slurm", tmp_path, 1, 1, gpus=0.5)
    refuses("cluster .* moon", launcher_of, "slurm", tmp_path, 1, 1, slurm=["cluster=moon"])


def test_jobs_of_slurm(
    fake: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One array; what was stopped before its time limit is submitted again, a failure is not."""
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    end_as(fake, "a/seed_0", "143")
    end_as(fake, "b/seed_0", "1")
    launcher = launcher_of("slurm", fake, 3, 2, 1, ["partition=gpu,time=04:00:00", "mem=2G"])
    monkeypatch.setattr(launcher, "pause", 0.1)
    assert Queue(GRID.runs(), fake, {}, launcher, [Watcher()]).run() == 0
    assert kinds(fake) == [FINISHED, FAILED, FINISHED, FINISHED]
    script = (cluster / "scripts").read_text()
    options = {"array=0-3%3", "partition=gpu", "time=04:00:00", "mem=2G", "gpus-per-node=1"}
    options |= {"signal=TERM@120", "cpus-per-task=2"}
    assert options <= {line.removeprefix("#SBATCH --") for line in script.splitlines()}
    assert script.count("#!/bin/bash") == 2
    # The same command repeats what has failed.
    assert Queue(GRID.runs(), fake, {}, launcher, [Watcher()]).run() == 0
    assert kinds(fake) == [FINISHED] * 4
    wrong = launcher_of("slurm", fake, 1, 1, 0, ["partition=none"])
    refuses("invalid partition", wrong.start, Command(fake, GRID.runs()[:1]))
    assert "sbatch" not in capsys.readouterr().err


def test_a_job_that_is_gone_is_started_again(
    fake: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where SLURM keeps no accounts; after two more attempts the run has failed."""
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    from ln_zoo.sweeps.launchers import slurm

    monkeypatch.setattr(slurm, "_LOOK_EVERY", 0.1)
    # Its jobs end without a result, as if killed.
    (cluster / "srun").write_text("#!/bin/sh\n")
    launcher = launcher_of("slurm", fake, 1, 1)
    monkeypatch.setattr(launcher, "pause", 0.1)
    assert Queue(GRID.runs()[:1], fake, {}, launcher, [Watcher()]).run() == 0
    assert (cluster / "scripts").read_text().count("#!/bin/bash") == 3
    state = state_of(fake / "a/seed_0")
    assert state.kind == FAILED
    assert "UNKNOWN" in state.error


def test_a_job_that_waits_forever_is_noted(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ln_zoo.sweeps.launchers.slurm import _Squeue

    said = "7_0 PartitionConfig\\n7_1 PartitionConfig\\n8 Priority"
    (cluster / "squeue").write_text(f"#!{sys.executable} -S\nprint('{said}')\n")
    queue = _Squeue()
    assert [queue.lacks(job) for job in ("7_0", "7_1", "8", "9")] == [False, False, False, True]
    (line,) = capsys.readouterr().err.splitlines()
    assert [word for word in ("7_0", "PartitionConfig", "--slurm") if word not in line] == []


def ended(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(200):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        )
        if not state.stdout.strip() or state.stdout.startswith("Z"):
            return True
        time.sleep(0.1)
    return False


def leaves_no_process(launcher: Launcher, out: Path) -> None:
    """Cancelled by its engine, a job takes the process of its run along."""
    end_as(out, "a/seed_0", "long")
    with launcher.opened():
        for end in ("stop", "kill"):
            handle = launcher.start(Command(out, GRID.runs()[:1]))
            pid = out / "a/seed_0/pid"
            while not pid.exists():
                time.sleep(0.1)
                assert handle.poll() is None
            getattr(handle, end)()
            assert ended(int(pid.read_text())), end
            while handle.poll() is None:
                time.sleep(0.1)
            pid.unlink()


def test_a_cancelled_job_leaves_no_process(fake: Path) -> None:
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    leaves_no_process(launcher_of("slurm", fake, 1, 1, 0, ["cluster=local"]), fake)


@pytest.mark.slow
def test_tasks_of_ray(fake: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    launcher = launcher_of("ray", fake, 2, 1)
    end_as(fake, "b/seed_0", "1")
    assert Queue(GRID.runs(), fake, {}, launcher, [Watcher()], jobs=2).run() == 0
    assert kinds(fake) == [FINISHED, FAILED, FINISHED, FINISHED]
    leaves_no_process(launcher, fake)


def test_a_machine_too_busy_for_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launcher = launcher_of("ray", tmp_path, 1, 1)
    refuses("node timed out.*--launcher local$", launcher.opened().__enter__)


def test_a_cluster_of_ray_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        refuses(f"RAY_ADDRESS='{address}'", launcher_of, "ray", Path("s"), 1, 1)


def test_signals_reach_the_run(fake: Path) -> None:
    """Those of an engine, to the process of its job."""
    end_as(fake, "a/seed_0", "long")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom ln_zoo.sweeps.grid import Run\n"
        "from ln_zoo.sweeps.launchers.base import Command, run_in_job\n"
        "run = Run('a.yaml', {}, 0, 'a/seed_0')\n"
        "sys.exit(-run_in_job(Command(Path(sys.argv[1]), [run]), os.getcwd()))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(fake)])
    while not (fake / "a/seed_0/pid").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == signal.SIGTERM
