"""`ln-zoo sweep` with real runs, and its refusals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_support import (
    CONFIGS,
    SCRIPT,
    cli,
    environment,
    installed,
    load,
    results,
    rows_of,
    same,
    succeed,
)
from refusals import refuses

from ln_zoo.cli.sweep import _summarize
from ln_zoo.sweeps.state import state_of

#: The network of the quickstart, on few of scikit-learn's digits.
QUICK = [f"--config={CONFIGS / 'quickstart.yaml'}", "--out=s"]
SMALL = (
    "--model.hidden_sizes=[8]", "--data.train_size=100", "--data.val_size=20",
    "--trainer.max_epochs=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "--config"),
        ("QUICK", "--norms"),
        ("QUICK --norms=layr", "'layr' 'layer'"),
        ("QUICK --norms=LayerNrom", "LayerNrom"),
        ("--config=no.yaml --norms=layer", "no.yaml"),
        ("LAYER --jobs=0", "--jobs 0"),
        ("LAYER --pack=0", "--pack 0"),
        ("LAYER --gpus=-1", "--gpus -1"),
        ("LAYER --launcher=moon", "--launcher moon"),
        ("LAYER --gpus=1", "--gpus --launcher"),
        ("LAYER --slurm=time=1", "--slurm --launcher"),
        ("LAYER --launcher=slurm --slurm=time", "--slurm 'time'"),
        ("LAYER --set=model.lr=log(1e-4,1e-2)", "log(1e-4,1e-2) --search"),
        ("LAYER --set=model.lr=log(0,1) --search=optuna", "log(0,1) LOW"),
        ("LAYER --search=optuna", "--search --set"),
        ("LAYER --trials=3", "--trials --search"),
        ("LAYER --set=model.lr=log(1,2) --search=optuna --pruner=A --seeds=2", "--pruner --seeds"),
        ("LAYER --max_time=9", "--max_time HH:MM:SS 9"),
        ("LAYER --max_time=00:00:00", "--max_time 00:00:00"),
        ("LAYER --max_time=00:70:00", "--max_time 00:70:00"),
        ("LAYER --set=model.lrr=1,2", "model.lrr=1 'lr'"),
        ("LAYER --set=model.lr=1e-3,fast", "model.lr=fast float"),
        ("LAYER --set=model.lr=1e-3,-1", "model.lr=-1 lr"),
        ("LAYER -- --trainer.max_epoch=3", "'trainer.max_epochs'"),
        ("LAYER -- --seed_everything=3", "--seed_everything --seeds"),
        ("LAYER --test=best", "--test ModelCheckpoint monitor"),
        ("LAYER -- --trainer.logger=false", "CSVLogger"),
        ("LAYER --out=file", "--out file"),
        ("LAYER --out=file/s", "--out file/s"),
    ],
)
def test_wrong_grids(here: Path, given: str, says: str) -> None:
    (here / "file").touch()
    argv = given.replace("LAYER", "QUICK --norms=layer").replace("QUICK", QUICK[0]).split()
    refuses(says.split(), cli, "sweep", "--out=s", *argv)
    assert not (here / "s/sweep.json").exists()


@pytest.fixture
def printed(here: Path) -> list[str]:
    """A grid of two norms with one seed each, not begun; a command each."""
    argv = ("sweep", *QUICK, "--norms=layer,none", "--seeds=3,", "--print", "--", *SMALL)
    return succeed(*argv).out.splitlines()


def test_runs_without_results_are_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk no run can note why it has failed."""
    for name, line in (("layer", "ln-zoo fit: error: No space left on device\n"), ("none", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(line)
    states = {name: state_of(tmp_path / name) for name in ("layer", "none")}
    assert _summarize(states, 0, tmp_path, ["ln-zoo", "sweep"]) == 1
    layer, none, last = capsys.readouterr().err.splitlines()
    assert "layer" in layer and "No space left" in layer  # noqa: PT018
    assert "none" in none
    assert "2 of 2" in last


def test_printed_commands_are_gathered(printed: list[str], here: Path) -> None:
    names = ["layer/seed_3", "none/seed_3"]
    assert printed == [f"ln-zoo sweep --out s --run {name}" for name in names]
    for command in printed:
        succeed(*command.split()[1:])
    assert "is finished" in succeed(*printed[0].split()[1:]).out
    # Only the report is left to do.
    for more in ([], ["--gather"]):
        assert "2 of 2 runs have finished." in succeed("sweep", "--out=s", *more).out
    curves, full = here / "s/report/curves.png", Path("/dev/full")
    assert curves.is_file()
    if full.exists():
        curves.unlink()
        curves.symlink_to(full)
        refuses(["No space left", "report/curves.png"], cli, "sweep", "--out=s", "--gather", code=1)
        curves.unlink()
    (here / "s/report").rename(here / "report")
    (here / "s/report").touch()
    refuses(["s/report", "--out"], cli, "sweep", "--out=s", "--gather")
    (here / "s/report").unlink()
    (here / "report").rename(here / "s/report")
    for row, name in zip(rows_of("s/report/runs.csv"), names, strict=True):
        measured = json.loads((here / f"s/{name}/test_results.json").read_text())
        assert float(row["error"]) == pytest.approx(100 * measured["metrics"]["error"])
        assert (measured["seed"], measured["data"].get("seed", 3)) == (3, 3)
    refuses(["no run"], cli, "sweep", "--out=s", "--run=")
    refuses(["--config", "--out"], cli, "sweep", "--out=s", "--seeds=5")
    # The grid may grow, but not change.
    grow = ("sweep", *QUICK, "--seeds=3,", "--print", "--norms=none,layer,RMSNorm", "--", *SMALL)
    assert succeed(*grow).out == "ln-zoo sweep --out s --run RMSNorm/seed_3\n"
    refuses(["norms"], cli, "sweep", *QUICK, "--norms=layer", "--seeds=4,", "--print", "--", *SMALL)


def test_runs_from_weights_are_tested_and_resumed(here: Path) -> None:
    """Weights that every run starts from are not given again with its own checkpoint."""
    done = succeed(
        "sweep", *QUICK, "--norms=layer", "--seeds=1", "--test=best", "--print", "--",
        "--weights=mlp.layernorm-digits", "--trainer.max_epochs=1",
        "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val_nll",
    )  # fmt: skip
    (command,) = done.out.splitlines()
    first = succeed(*command.split()[1:])
    # Lightning would warn of files that it never replaces here.
    assert "is not empty" not in first.err
    assert "dirpath has changed" not in first.err
    tested = here / "s/layer/seed_0/sweep_test/test_results.json"
    runs = json.loads(tested.read_text())["training_runs"]
    assert [run["epochs"] for run in runs] == [15, 1]
    # Without its results the run resumes; no epoch is left to train.
    tested.unlink()
    succeed(*command.split()[1:])
    assert json.loads(tested.read_text())["training_runs"] == runs


def test_a_sweep_is_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in a copy at another place, without its configuration, also with own classes and
    with files that are named by relative paths."""
    project = here / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    config = Path("base.yaml")
    text = (CONFIGS / "quickstart.yaml").read_text()
    text = text.replace(
        "ln_zoo.data.Digits\n  init_args:\n", "my_norm.My\n  init_args:\n    a: a.txt\n"
    )
    text += "  logger: [class_path: my_norm.Mine, class_path: CSVLogger]\n"
    config.write_text(text)
    Path("my_norm.py").write_text(
        "import dataclasses, os\nfrom ln_zoo.data import Digits\n"
        "from ln_zoo.norms import LayerNorm\n"
        "from lightning.pytorch.loggers.logger import DummyLogger\n"
        "class Mine(DummyLogger):\n    pass\n"
        "@dataclasses.dataclass(frozen=True)\nclass MyNorm(LayerNorm):\n    pass\n"
        "class My(Digits):\n    def __init__(self, a: str, folder: str, **options):\n"
        "        super().__init__(**options)\n"
        "        assert os.listdir(folder) == [open(a).read()]\n"
    )
    Path("a.txt").write_text("b.txt")
    Path("data").mkdir()
    Path("data/b.txt").touch()
    argv = ("sweep", "--config=base.yaml", "--out=sweeps/s", "--norms=my_norm.MyNorm")
    small = (*SMALL, "--data.folder=data")
    printed = succeed(*argv, "--seeds=2", "--print", "--", *small).out.splitlines()
    stored = json.loads(Path("sweeps/s/sweep.json").read_text())
    assert stored["format_version"] == 2
    assert stored["contents"]["base.yaml"] == config.read_text()
    assert stored["modules"] == {"my_norm": ["../..", str(project)]}
    assert stored["folders"] == ["../..", str(project)]
    assert stored["paths"] == ["a.txt", "base.yaml", "data", "my_norm.py"]
    config.unlink()
    project.rename(here / "moved")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    out = "--out=../moved/sweeps/s"
    name = printed[0].split()[-1]
    refuses(["no run"], cli, "sweep", out, "--run=layer/seed_0")
    succeed("sweep", out, f"--run={name}")
    assert "1 of 2 runs have finished." in succeed("sweep", out, "--gather").out
    succeed("sweep", out)
    found = [results(here / f"moved/sweeps/s/MyNorm/seed_{seed}") for seed in (0, 1)]
    assert [each["norm"] for each in found] == ["MyNorm", "MyNorm"]
    # Without the module there is one line, and no run is marked as failed.
    (here / "moved/my_norm.py").unlink()
    shutil.rmtree(here / f"moved/sweeps/s/{name}")
    refuses(["my_norm"], cli, "sweep", out, f"--run={name}")
    assert not (here / f"moved/sweeps/s/{name}/failure.json").exists()


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_runs_are_a_group_of_the_logger(
    here: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in one process, and beside the files of CSVLogger, which the sweep reads."""
    pytest.importorskip(package, reason=f"needs the package {package}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"trainer": {"logger": [{"class_path": "WandbLogger"}, {"class_path": "CSVLogger"}]}}
    if package == "mlflow":
        pytest.importorskip("sqlalchemy", reason="a database of MLflow needs the whole mlflow")
        given = {"tracking_uri": f"sqlite:///{here}/mlflow.db"}
        config["trainer"]["logger"][0] = {"class_path": "MLFlowLogger", "init_args": given}
    Path("loggers.yaml").write_text(json.dumps(config))
    argv = ("--norms=layer,none", "--seeds=1", "--pack=2", "--", *SMALL)
    succeed("sweep", QUICK[0], "--config=loggers.yaml", "--out=rates", *argv)
    runs = ["layer/seed_0", "none/seed_0"]
    for name in runs:
        assert rows_of(f"rates/{name}/metrics.csv")
    if package == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(given["tracking_uri"])
        found = client.get_experiment_by_name("rates").experiment_id
        assert sorted(run.info.run_name for run in client.search_runs([found])) == runs
    else:
        files = [path.read_bytes() for path in Path().rglob("run-*.wandb")]
        assert len(files) == 2
        for name in runs:
            # Fields of the record: the group, then the run's name.
            record = f"\x05ratesB{chr(len(name))}{name}".encode()
            (content,) = (each for each in files if record in each)
            assert b"val_nll" in content


def grid(folder: Path) -> list[str]:
    return ["sweep", QUICK[0], f"--out={folder}", "--jobs=2", "--norms=layer,batch", "--seeds=2"]


def start(folder: Path) -> subprocess.Popen[bytes]:
    options = {"env": environment(), "stdout": subprocess.DEVNULL, "cwd": folder.parent}
    return subprocess.Popen([str(SCRIPT), *grid(folder)], **options)


def tables(folder: Path) -> dict[str, str]:
    """The tables of the report, without seconds."""
    found = {}
    for name in ("runs", "spread", "differences", "curves", "reached"):
        rows = rows_of(folder / f"report/{name}.csv")
        timeless = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
        found[name] = json.dumps(timeless)
    return found


@pytest.mark.slow
def test_killed_at_random_times_it_makes_the_same_table(tmp_path: Path) -> None:
    """20 times by SIGKILL: the sweep alone, whose runs then end, or with all of its runs.

    Each time it goes on from a copy at another path, as on another machine, without the files that
    the how-to on comparisons leaves out.
    """
    assert installed(tmp_path, *grid(tmp_path / "whole"), timeout=3000).code == 0
    chance, kills, broken = random.Random(0), 0, tmp_path / "broken"
    while kills < 20:
        process = start(broken)
        time.sleep(chance.uniform(2, 30))
        asked = ["pgrep", "-P", str(process.pid)]
        children = subprocess.run(asked, capture_output=True, text=True).stdout.split()
        if process.poll() is not None:
            # It has finished: once more from nothing.
            assert process.returncode == 0
            assert tables(broken) == tables(tmp_path / "whole")
            shutil.rmtree(broken)
            continue
        process.kill()
        process.wait()
        kills += 1
        if chance.random() < 0.5:
            for child in map(int, children):
                with contextlib.suppress(ProcessLookupError):
                    while True:  # until it is gone
                        os.kill(child, signal.SIGKILL)
                        time.sleep(0.05)
            copy = tmp_path / f"moved-{kills}"
            left_out = shutil.ignore_patterns("last-previous.ckpt", "events.out.*", "samples")
            shutil.copytree(broken, copy, ignore=left_out)
            shutil.rmtree(broken)
            broken = copy
    assert installed(tmp_path, *grid(broken), timeout=3000).code == 0
    assert tables(broken) == tables(tmp_path / "whole")


def weights(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("*/*/checkpoints/last.ckpt"))
    return [load(path)["state_dict"] for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("torch", ["--pack=4"]),
        ("submitit", ["--launcher=slurm", "--slurm=cluster=local", "--pack=2", "--jobs=2"]),
        ("ray", ["--launcher=ray", "--pack=2", "--jobs=2"]),
    ],
)
def test_all_launchers_give_the_same_weights(
    tmp_path: Path, package: str, options: list[str]
) -> None:
    """Also after SIGTERM and SIGKILL in the middle; no lock and no process is left."""
    pytest.importorskip(package, reason="needs the extra for it")
    argv = ["sweep", QUICK[0], "--norms=layer,none", "--seeds=2", "--threads=1"]
    small = ["--", *SMALL[:-1], "--trainer.max_epochs=20"]
    assert installed(tmp_path, *argv, "--out=whole", *small, timeout=3000).code == 0
    broken = tmp_path / "broken"
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        command = [str(SCRIPT), *argv, f"--out={broken}", *options, *small]
        process = subprocess.Popen(command, env=environment(), cwd=tmp_path)
        if number is not None:
            known = set(broken.glob("*/*/checkpoints/last.ckpt"))
            while not set(broken.glob("*/*/checkpoints/last.ckpt")) - known:
                time.sleep(0.1)
                assert process.poll() is None
            process.send_signal(number)
        code = process.wait(timeout=3000)
        assert code == {signal.SIGTERM: 143, signal.SIGKILL: -9, None: 0}[number]
    assert same(weights(broken), weights(tmp_path / "whole"))
    assert len(weights(broken)) == 4
    assert list(broken.rglob("*.owner")) == []
    asked = ["pgrep", "-f", "--", f"--out={broken} .*--attached"]
    assert subprocess.run(asked, capture_output=True).returncode == 1


@pytest.mark.slow
def test_two_sweeps_share_a_folder(tmp_path: Path) -> None:
    """From two folders at once, with SIGKILL of either; every run is trained once to its end."""
    small = ["--", *SMALL[:-1], "--trainer.max_epochs=10"]
    argv = ["sweep", QUICK[0], "--norms=layer,none", "--seeds=3", "--threads=1"]
    assert installed(tmp_path, *argv, "--out=whole", "--pack=6", *small, timeout=3000).code == 0
    shared, chance = tmp_path / "shared", random.Random(0)
    clones: list[subprocess.Popen[bytes] | None] = [None, None]
    killed = 0
    while any(clone is None or clone.returncode != 0 for clone in clones):
        for place, clone in enumerate(clones):
            if clone is None or clone.poll() not in (None, 0):
                folder = tmp_path / f"clone{place}"
                folder.mkdir(exist_ok=True)
                command = [str(SCRIPT), *argv, f"--out={shared}", *small]
                clones[place] = subprocess.Popen(command, env=environment(), cwd=folder)
        time.sleep(chance.uniform(2, 20))
        victim = clones[chance.randrange(2)]
        if victim is not None and victim.poll() is None and killed < 10:
            victim.kill()
            victim.wait()
            killed += 1
    assert killed
    assert same(weights(shared), weights(tmp_path / "whole"))
    assert len(weights(shared)) == 6
    assert list(shared.rglob("*.owner")) == []
