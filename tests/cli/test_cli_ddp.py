"""Two processes give the numbers of one; half precision; what fails in one stops both."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from cli_support import Done, load, run, script, write_idx

from ln_zoo.data import MNIST
from ln_zoo.models import MLPClassifier

TWO = ("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu")
ONE = ("--trainer.devices=1", "--trainer.accelerator=cpu")
#: 13 test images in batches of 5, 41 training images in batches of 2 x 4: no share is another's.
SIZES = {"batch_size": 4, "train_size": 41, "val_size": 19, "eval_batch_size": 5}
DATA = ("--data=MNIST", "--data.root=mnist", *(f"--data.{k}={v}" for k, v in SIZES.items()))
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
#: Two processes share the two cores of a small machine with all else that runs there.
TIMEOUT = 300


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder where two processes trained a batch-normalised model and tested it.

    Without validation: that would give the processes one set of running statistics.
    """
    folder = tmp_path_factory.mktemp("ddp")
    write_idx(folder / "mnist")
    done = script(
        folder, "fit", "--model=MLPClassifier", "--model.hidden_features=[8]",
        "--model.norm=BatchNorm", *DATA, *QUIET, *TWO, "--trainer.max_epochs=2",
        "--trainer.limit_val_batches=0", "--trainer.callbacks+=EpochEvaluation",
        "--trainer.callbacks+=StepEvaluation", "--trainer.callbacks.every_n_steps=5",
        "--trainer.callbacks.cases=11", "--trainer.log_every_n_steps=1", "--test_after_fit=true",
        timeout=TIMEOUT,
    )  # fmt: skip
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture
def in_fitted(fitted: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(fitted[0])
    return fitted[0]


def run_folder(folder: Path, version: int) -> Path:
    return folder / f"runs/MLPClassifier-BatchNorm/version_{version}"


def results(folder: Path) -> dict:
    return json.loads((folder / "test_results.json").read_text())


def newest(folder: Path) -> Path:
    runs = folder.glob("runs/MLPClassifier-BatchNorm/version_*")
    return max(runs, key=lambda path: int(path.name.rpartition("_")[2]))


def test_fit_and_test_equal_one_process(fitted: tuple[Path, Done], in_fitted: Path) -> None:
    first = run_folder(in_fitted, 0)
    two = results(first)
    assert (two["processes"], two["steps"], two["epochs"]) == (2, 10, 2)
    assert fitted[1].out.count("measured") == 1  # one table, not one for each process
    done = run("test", "--ckpt_path", first / "checkpoints/last.ckpt", *DATA, *QUIET, *ONE)
    assert done.code == 0, done.err
    one = results(newest(in_fitted))
    assert one["processes"] == 1
    assert one["metrics"] == two["metrics"]
    assert one["checkpoint_sha256"] == two["checkpoint_sha256"]


def test_epoch_evaluation_equals_one_process(in_fitted: Path) -> None:
    first = run_folder(in_fitted, 0)
    with (first / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["epoch_train_nll"]]
    assert len(rows) == 2
    model = MLPClassifier.load_from_checkpoint(first / "checkpoints/last.ckpt").eval()
    data = MNIST("mnist", **SIZES)
    data.setup()

    def mean(loader, train: bool = False) -> dict[str, float]:
        total: dict[str, list] = {"nll": [], "error": []}
        for batch in loader:
            if train:
                if len(batch[1]) < 2:
                    continue
                model.train()
            with torch.no_grad():
                for name, values in model.per_case(batch).items():
                    total[name] += values.tolist()
            model.eval()
        return {name: sum(values) / len(values) for name, values in total.items()}

    scored = {"train": mean(data.train_eval_dataloader()), "test": mean(data.test_dataloader())}
    scored["train_batch"] = mean(data.train_eval_dataloader(), train=True)
    for name, expected in scored.items():
        for metric, value in expected.items():
            # Logged in float32; a share or a repeated case would differ in the second digit.
            assert float(rows[-1][f"epoch_{name}_{metric}"]) == pytest.approx(value, rel=1e-7)


def test_step_evaluation_equals_one_process(in_fitted: Path) -> None:
    first = run_folder(in_fitted, 0)
    with (first / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["step_train_nll"]]
    assert [int(row["step"]) for row in rows] == [0, 5, 10]
    model = MLPClassifier.load_from_checkpoint(first / "checkpoints/last.ckpt").eval()
    data = MNIST("mnist", **SIZES)
    data.setup()
    inputs, labels = next(iter(data.train_eval_dataloader(batch_size=11)))
    with torch.no_grad():
        scores = model.per_case((inputs, labels))
    for name, values in scores.items():
        assert float(rows[-1][f"step_train_{name}"]) == pytest.approx(
            float(values.mean()), rel=1e-6
        )


def test_random_states_of_both_processes_are_kept(in_fitted: Path) -> None:
    checkpoint = load(run_folder(in_fitted, 0) / "checkpoints/last.ckpt")
    assert checkpoint["rng_state"].shape == (2, len(torch.get_rng_state()))


def test_half_precision_equals_one_process(in_fitted: Path) -> None:
    last = run_folder(in_fitted, 0) / "checkpoints/last.ckpt"
    command = ["test", "--ckpt_path", last, *DATA, *QUIET, "--trainer.precision=bf16-mixed"]
    assert script(in_fitted, *command, *TWO, timeout=TIMEOUT).code == 0
    two = results(newest(in_fitted))
    assert run(*command, *ONE).code == 0
    one = results(newest(in_fitted))
    assert (two["processes"], two["precision"]) == (2, "bf16-mixed")
    assert (one["processes"], one["precision"]) == (1, "bf16-mixed")
    assert one["metrics"] == two["metrics"]
    full = results(run_folder(in_fitted, 0))["metrics"]["nll"]
    assert one["metrics"]["nll"] != full
    assert one["metrics"]["nll"] == pytest.approx(full, rel=0.05)


def test_fit_in_half_precision(in_fitted: Path) -> None:
    done = run(
        "fit", "--model=MLPClassifier", "--model.hidden_features=[8]", "--model.norm=BatchNorm",
        *DATA, *QUIET, *ONE, "--trainer.max_epochs=1", "--trainer.precision=bf16-mixed",
        "--trainer.callbacks+=EpochEvaluation", "--test_after_fit=true",
    )  # fmt: skip
    assert done.code == 0, done.err
    folder = newest(in_fitted)
    state = load(folder / "checkpoints/last.ckpt")["state_dict"]
    assert all(torch.isfinite(v).all() for v in state.values())
    assert state["network.1.weight"].dtype == torch.float32
    with (folder / "metrics.csv").open() as file:
        (scored,) = [row for row in csv.DictReader(file) if row["epoch_test_nll"]]
    # What scores after each epoch runs in the precision of the test.
    tested = results(folder)["metrics"]["nll"]
    assert float(scored["epoch_test_nll"]) == pytest.approx(tested, rel=1e-7)


def test_predictions_of_two_processes_are_those_of_one(in_fitted: Path) -> None:
    last = run_folder(in_fitted, 0) / "checkpoints/last.ckpt"
    command = ["predict", "--ckpt_path", last, *DATA, *QUIET]
    done = script(in_fitted, *command, *TWO, timeout=TIMEOUT)
    assert done.code == 0, done.err
    shares = sorted(newest(in_fitted).glob("predictions*"))
    assert [path.name for path in shares] == ["predictions-0.jsonl", "predictions-1.jsonl"]
    assert run(*command, *ONE).code == 0
    (whole,) = newest(in_fitted).glob("predictions*")

    def cases(*paths: Path) -> list[dict]:
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["index"])

    assert [case["index"] for case in cases(whole)] == list(range(13))
    for one, two in zip(cases(whole), cases(*shares), strict=True):
        # Cases come in other batches: the last bits of a float32 product follow its shape.
        assert two.pop("probability") == pytest.approx(one.pop("probability"), rel=1e-6)
        assert two == one


#: A user's model, whose loss is not a number in one process and one step alone.
BAD = """
import os
from ln_zoo.models import MLPClassifier

class Bad(MLPClassifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if os.environ.get("LOCAL_RANK") == "1" and self.trainer.global_step == 7:
            loss = loss * float("nan")
        return loss
"""


def test_a_bad_loss_in_one_process_stops_both(fitted: tuple[Path, Done], in_fitted: Path) -> None:
    (in_fitted / "bad_models.py").write_text(BAD)
    done = script(
        in_fitted, "fit", "--model=bad_models.Bad", "--model.hidden_features=[8]", *DATA, *QUIET,
        *TWO, "--trainer.max_epochs=3", timeout=TIMEOUT,
    )  # fmt: skip
    assert done.code == 1
    last = "runs/Bad-LayerNorm/version_0/checkpoints/last.ckpt"
    message = "the training loss is not finite at step 7 (epoch 1): training stopped, and the last"
    assert f"ln-zoo fit: error: {message} good checkpoint is " in done.err
    assert last in done.err
    assert load(in_fitted / last)["global_step"] == 5


def test_validation_with_batch_statistics_equals_one_process(in_fitted: Path) -> None:
    """Of five images in batches of two the last is alone, and has no statistics."""
    last = run_folder(in_fitted, 0) / "checkpoints/last.ckpt"
    data = ("--data=MNIST", "--data.root=mnist", "--data.train_size=40", "--data.val_size=5")
    command = ["validate", "--ckpt_path", last, *data, "--data.eval_batch_size=2", *QUIET]
    assert script(in_fitted, *command, *TWO, timeout=TIMEOUT).code == 0
    two = validated(newest(in_fitted))
    assert run(*command, *ONE).code == 0
    one = validated(newest(in_fitted))
    assert set(one) == {"val_nll", "val_error", "val_batch_nll", "val_batch_error"}
    assert two == pytest.approx(one, rel=1e-6)
    assert one["val_batch_nll"] != pytest.approx(one["val_nll"], rel=1e-3)


def validated(folder: Path) -> dict[str, float]:
    with (folder / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    return {name: float(value) for name, value in row.items() if name.startswith("val")}


def test_statistics_across_processes_are_those_of_one(in_fitted: Path) -> None:
    """Two processes with batches of 4 train as one with batches of 8, of the same images."""
    command = [
        "fit", "--model=ConvClassifier", "--model.channels=[[2], [3]]", "--model.hidden_features=4",
        "--model.norm", "BatchNorm", "--model.norm.across_processes", "true",
        "--model.optimizer=sgd", "--model.lr=0.01", *DATA, *QUIET, "--trainer.max_epochs=1",
        "--trainer.limit_val_batches=0", "--trainer.logger.save_dir=across",
    ]  # fmt: skip
    done = script(in_fitted, *command, *TWO, timeout=TIMEOUT)
    assert done.code == 0, done.err
    done = run(*command, *ONE, "--data.batch_size=8")
    assert done.code == 0, done.err
    folder = in_fitted / "across/ConvClassifier-BatchNorm"
    two, one = (load(folder / f"version_{n}/checkpoints/last.ckpt") for n in (0, 1))
    assert (two["global_step"], one["global_step"]) == (5, 5)
    assert two["hyper_parameters"]["norm"]["init_args"]["across_processes"] is True
    assert two["state_dict"].keys() == one["state_dict"].keys()
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name)
