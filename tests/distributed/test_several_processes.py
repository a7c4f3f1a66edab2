"""Several processes give the numbers of one; half precision; what fails in one stops both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import (
    QUIET,
    Done,
    environment,
    load,
    results,
    rows_of,
    same,
    succeed,
    together,
    write_idx,
)  # fmt: skip

from ln_zoo.data import MNIST
from ln_zoo.models import MLPClassifier

TWO = ("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu")
ONE = ("--trainer.devices=1", "--trainer.accelerator=cpu")
#: 13 test images in batches of 5, 41 training images in batches of 2 x 4: no share is another's.
SIZES = {"batch_size": 4, "train_size": 41, "val_size": 19, "eval_batch_size": 5}
DATA = ("--data=MNIST", "--data.root=mnist", *(f"--data.{k}={v}" for k, v in SIZES.items()))
#: Two processes share the two cores of a small machine with all else that runs there.
TIMEOUT = 300


#: Of five images in batches of two the last is alone, and has no statistics.
FEW = ("--data=MNIST", "--data.root=mnist", "--data.train_size=40", "--data.val_size=5")
FIT = [
    "fit", "--model=MLPClassifier", "--model.hidden_sizes=[8]", "--model.norm=BatchNorm",
    *DATA, *QUIET, "--trainer.max_epochs=2", "--trainer.limit_val_batches=0",
    "--trainer.callbacks+=EpochEvaluation", "--trainer.callbacks+=StepEvaluation",
    "--trainer.callbacks.every_n_steps=5", "--trainer.callbacks.examples=11",
    "--trainer.log_every_n_steps=1", "--test_after_fit=true",
]  # fmt: skip
LAST = "two/fit/MLPClassifier-BatchNorm/version_0/checkpoints/last.ckpt"
#: 24 training examples in batches of 4 make 3 updates of two processes, 13 and 11 make odd shares.
SMALL_SETS = (
    "--data.train_size=24", "--data.batch_size=4", "--data.val_size=13", "--data.test_size=11",
    "--data.eval_batch_size=3", "--trainer.max_epochs=2",
)  # fmt: skip
AVERAGE = ("--trainer.callbacks=PopulationStatistics", "--trainer.callbacks.method=average")
#: What two processes do, and one, by the folder of the runs.
COMMANDS = {
    "half": ["test", "--ckpt_path", LAST, *DATA, *QUIET, "--trainer.precision=bf16-mixed"],
    "predicted": ["predict", "--ckpt_path", LAST, *DATA, *QUIET],
    "validated": ["validate", "--ckpt_path", LAST, *FEW, "--data.eval_batch_size=2", *QUIET],
    "population": ["test", "--ckpt_path", LAST, *DATA, *QUIET, *AVERAGE],
    "across": [
        "fit", "--model=ConvClassifier", "--model.channels=[[2], [3]]", "--model.hidden_size=4",
        "--model.norm", "BatchNorm", "--model.norm.sync", "true",
        "--model.optimizer=sgd", "--model.lr=0.01", *DATA, *QUIET, "--trainer.max_epochs=1",
        "--trainer.limit_val_batches=0",
    ],
    "from_data": [
        "fit", "--model=MLPClassifier", "--model.hidden_sizes=[8]", "--model.norm=WeightNorm",
        *DATA, *QUIET, "--trainer.max_epochs=1", "--trainer.limit_val_batches=0",
        "--trainer.callbacks+=DataDependentInit", "--trainer.callbacks.batch_size=20",
        "--trainer.callbacks+=witness.Witness",
    ],
    # Without Adam, which would not notice a sum of one process in place of both.
    "scenes": [
        "fit", "--model=OrderEmbedding", "--model.embedding_features=6", "--optimizer=SGD",
        "--optimizer.lr=1e-2", "--model.clip=none",
        "--model.hidden_size=8", "--model.fold_size=6", "--data=SyntheticScenes",
        "--data.image_features=9", *SMALL_SETS, *QUIET, "--test_after_fit=true",
    ],
    "passages": [
        "fit", "--model=AttentiveReader", "--model.hidden_size=6", "--model.dropout=0",
        "--model.lr=0.01", "--trainer.gradient_clip_val=1", "--data=SyntheticClozeQA",
        *SMALL_SETS, *QUIET, "--test_after_fit=true",
    ],
    # Likewise.
    "sentences": [
        "fit", "--model=SkipThought", "--model.hidden_size=6", "--model.embedding_features=4",
        "--optimizer=SGD", "--optimizer.lr=1e-3", "--data=SyntheticBooks", "--data.books=6",
        "--data.paragraphs=5", "--data.batch_size=4", "--data.eval_batch_size=7",
        "--trainer.max_epochs=2", "--trainer.limit_train_batches=3", *QUIET,
        "--test_after_fit=true",
    ],
}  # fmt: skip
#: A user's callback that keeps the weights that each process starts with.
WITNESS = """
import torch
from lightning.pytorch import Callback

class Witness(Callback):
    def setup(self, trainer, pl_module, stage):
        if stage == "fit":
            path = f"start-{trainer.world_size}-{trainer.global_rank}.pt"
            torch.save(pl_module.state_dict(), path)
"""


def to(folder: str) -> str:
    return f"--trainer.logger.save_dir={folder}"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder where two processes trained a batch-normalised model, tested it, and went on.

    They did all of `COMMANDS`, without being started anew for each. Without validation in training:
    that would give the processes one set of running statistics.
    """
    folder = tmp_path_factory.mktemp("ddp")
    write_idx(folder / "mnist")
    (folder / "witness.py").write_text(WITNESS)
    commands = {"fit": FIT} | COMMANDS
    done = together(
        folder,
        *([*command, *TWO, to(f"two/{name}")] for name, command in commands.items()),
        timeout=TIMEOUT,
    )
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture
def in_fitted(fitted: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(fitted[0])
    return fitted[0]


def of(processes: str, name: str) -> Path:
    """The folder of the run of one of `COMMANDS` by one or two processes."""
    (found,) = Path(processes, name).glob("*/version_0")
    return found


def by_one(name: str, *more: str) -> Path:
    """Does one of `COMMANDS` in one process; the folder of its run."""
    succeed(*COMMANDS[name], *ONE, to(f"one/{name}"), *more)
    return of("one", name)


def test_fit_and_test_equal_one_process(fitted: tuple[Path, Done], in_fitted: Path) -> None:
    two = results(of("two", "fit"))
    assert (two["processes"], two["steps"], two["epochs"]) == (2, 10, 2)
    scored = ("fit", "half", "validated", "population", "scenes", "passages", "sentences")
    assert fitted[1].out.count("measured") == len(scored)  # one table, not one for each process
    succeed("test", "--ckpt_path", LAST, *DATA, *QUIET, *ONE)
    one = results(Path("runs"))
    assert one["processes"] == 1
    # Means of other shares are summed in another order, and of other batches.
    assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-6)
    assert one["checkpoint_sha256"] == two["checkpoint_sha256"]
    assert load(Path(LAST))["rng_state"].shape == (2, len(torch.get_rng_state()))


def test_evaluation_in_training_equals_one_process(in_fitted: Path) -> None:
    rows = rows_of(of("two", "fit") / "metrics.csv")
    by_epoch = [row for row in rows if row["epoch_train_nll"]]
    by_step = [row for row in rows if row["step_train_nll"]]
    assert len(by_epoch) == 2
    assert [int(row["step"]) for row in by_step] == [0, 5, 10]
    model = MLPClassifier.load_from_checkpoint(LAST).eval()
    data = MNIST("mnist", **SIZES)
    data.setup()

    @torch.no_grad()
    def mean(loader, train: bool = False) -> dict[str, float]:
        batches = [batch for batch in loader if not train or len(batch[1]) > 1]
        scores = [model.train(train).per_example(batch) for batch in batches]
        model.eval()
        return {name: float(torch.cat([s[name] for s in scores]).mean()) for name in scores[0]}

    for name, expected in {
        "epoch_train": mean(data.train_eval_dataloader()),
        "epoch_test": mean(data.test_dataloader()),
        "step_train": mean([next(iter(data.train_eval_dataloader(batch_size=11)))]),
        # Last: it changes the running statistics.
        "epoch_train_batch": mean(data.train_eval_dataloader(), train=True),
    }.items():
        logged = by_step[-1] if name == "step_train" else by_epoch[-1]
        for metric, value in expected.items():
            # Logged in float32; a share or a repeated example would differ in the second digit.
            assert float(logged[f"{name}_{metric}"]) == pytest.approx(value, rel=1e-6)


def test_predictions_of_two_processes_are_those_of_one(in_fitted: Path) -> None:
    shares = sorted(of("two", "predicted").glob("predictions*"))
    assert [path.name for path in shares] == ["predictions-0.jsonl", "predictions-1.jsonl"]
    (whole,) = by_one("predicted").glob("predictions*")

    def examples(*paths: Path) -> list[dict]:
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["index"])

    assert [example["index"] for example in examples(whole)] == list(range(13))
    for one, two in zip(examples(whole), examples(*shares), strict=True):
        # Examples come in other batches: the last bits of a float32 product follow its shape.
        assert two.pop("probability") == pytest.approx(one.pop("probability"), rel=1e-6)
        assert two == one


def validations(folder: Path) -> list[dict[str, float]]:
    """The scores of each validation of a run."""
    table = folder / "metrics.csv"
    rows = rows_of(table) if table.exists() else []
    scores = [{k: float(v) for k, v in row.items() if k[:4] == "val_" and v} for row in rows]
    return [score for score in scores if score]


#: Two processes with a batch each train as one with the mean gradient of two batches. Without Adam,
#: the sum over both batches, of which gradients are the mean, needs twice the learning rate.
TWICE = "--trainer.accumulate_grad_batches=2"
ALONE = {
    "validated": (),
    "across": ("--data.batch_size=8",),
    "scenes": (TWICE, "--optimizer.lr=2e-2"),
    "passages": (TWICE,),
    "sentences": (TWICE, "--trainer.limit_train_batches=6", "--optimizer.lr=2e-3"),
}


@pytest.mark.parametrize("name", ALONE)
def test_two_processes_equal_one(in_fitted: Path, name: str) -> None:
    folders = of("two", name), by_one(name, *ALONE[name])
    along = [validations(folder) for folder in folders]
    assert len(along[0]) == {"validated": 1, "across": 0}.get(name, 2)
    for scores, alone in zip(*along, strict=True):
        assert scores == pytest.approx(alone, rel=1e-6 if name == "validated" else 1e-4)
    if name == "validated":
        (scores,) = along[0]
        assert set(scores) == {"val_nll", "val_error", "val_batch_nll", "val_batch_error"}
        assert scores["val_batch_nll"] != pytest.approx(scores["val_nll"], rel=1e-3)
        return
    two, one = (load(folder / "checkpoints/last.ckpt") for folder in folders)
    assert two["global_step"] == one["global_step"] == (5 if name == "across" else 6)
    assert two["state_dict"].keys() == one["state_dict"].keys()
    for key, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["half", "scenes", "passages", "sentences"])
def test_scores_of_two_processes_equal_those_of_one(in_fitted: Path, name: str) -> None:
    """The same weights score the same, up to the order of float64 sums."""
    data = [a for a in COMMANDS[name] if a.startswith(("--data", "--trainer.precision"))]
    last = LAST if name == "half" else of("two", name) / "checkpoints/last.ckpt"
    argv = ("--ckpt_path", last, *data, *QUIET, *ONE)
    succeed("test", *argv, to(f"one/test-{name}"))
    two, one = (results(of(*folder)) for folder in (("two", name), ("one", f"test-{name}")))
    assert [each["processes"] for each in (two, one)] == [2, 1]
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-14)
    if name == "half":
        assert two["precision"] == one["precision"] == "bf16-mixed"
        full = results(of("two", "fit"))["metrics"]["nll"]
        assert full != one["metrics"]["nll"] == pytest.approx(full, rel=0.05)


def test_population_statistics_of_two_processes_are_those_of_one(
    fitted: tuple[Path, Done], in_fitted: Path
) -> None:
    # The last of 41, alone in its batch, has no statistics.
    folders = of("two", "population"), by_one("population")
    two, one = map(results, folders)
    written = folders[0] / "population.ckpt"
    assert fitted[1].err.count(str(written)) == 1
    for found in (one, two):
        facts = {"method": "average", "batch_size": 5, "examples": 40}
        assert found["population_statistics"] == facts
        assert found["data"]["eval_batch_size"] == 5
    assert two["checkpoint"] == "population.ckpt"
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    states = [load(folder / "population.ckpt")["state_dict"] for folder in folders]
    for name, value in states[1].items():
        # Sums of float64 in another order: a bit of float32 at most.
        torch.testing.assert_close(states[0][name], value, rtol=3e-7, atol=1e-8)
    succeed("test", "--ckpt_path", written, *DATA, *QUIET, *ONE, to("again"))
    assert results(of("again", ""))["metrics"] == two["metrics"]


def test_data_dependent_initialisation_starts_two_processes_alike(
    fitted: tuple[Path, Done], in_fitted: Path
) -> None:
    done = succeed(*COMMANDS["from_data"], *ONE, to("one/from_data"))
    for each in (done, fitted[1]):
        assert (each.out + each.err).count("data-dependent initialisation of network.1") == 1
    alone, *shared = (load(Path(f"start-{name}.pt")) for name in ("1-0", "2-0", "2-1"))
    assert alone.keys() == shared[0].keys()
    for state in shared:
        assert same(dict(state), dict(alone))
    weight = alone["network.1.weight"]
    assert not torch.isclose(alone["network.1.site.scale"], weight.norm(dim=1)).any()


# Two nodes of two processes, each node a launcher of its own, ``torchrun``, as on a cluster

RUN = "import sys\nfrom ln_zoo.cli import main\nsys.exit(main(sys.argv[1:]))\n"
#: 24 training images make equal shares of batches; 13 test images are nobody's multiple.
COMMON = (
    "--model=MLPClassifier", "--model.hidden_sizes=[8]", "--model.norm=LayerNorm", "--data=MNIST",
    "--data.root=mnist", "--data.train_size=24", "--data.val_size=13", "--data.eval_batch_size=3",
    "--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
)  # fmt: skip


def nodes(folder: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Both launchers, each writing to a file of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = []
    for node in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
            f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "run.py",
            *arguments, "--trainer.num_nodes=2", "--trainer.devices=2", "--trainer.strategy=ddp",
        ]  # fmt: skip
        with (folder / f"node{node}.log").open("wb") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            started.append(subprocess.Popen(command, cwd=folder, env=environment(), **options))
    return started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_idx(tmp_path / "mnist")
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_two_nodes_give_the_scores_of_one_process(folder: Path) -> None:
    fit = ("fit", *COMMON, "--trainer.max_epochs=2", "--test_after_fit=true")
    both = nodes(folder, *fit, "--data.batch_size=2", "--trainer.logger.save_dir=four")
    try:
        codes = [process.wait(timeout=600) for process in both]
    finally:
        end(both)
    logs = [(folder / f"node{node}.log").read_text()[-3000:] for node in range(2)]
    assert codes == [0, 0], logs
    alone = ("--data.batch_size=8", "--trainer.devices=1", "--trainer.logger.save_dir=one")
    one = [sys.executable, "run.py", *fit, *alone]
    subprocess.run(one, cwd=folder, env=environment(), check=True, timeout=600)
    single, four = (results(folder / name)["metrics"] for name in ("one", "four"))
    assert four == pytest.approx(single, rel=1e-5)
