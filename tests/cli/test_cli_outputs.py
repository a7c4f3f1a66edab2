"""What a run leaves behind, what it says, and where it refuses to begin."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from cli_support import (
    CONFIGS,
    QUIET,
    SMALL,
    fails,
    fit,
    installed,
    load,
    python,
    run,
    same,
    script,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier

QUICKSTART = CONFIGS / "quickstart.yaml"


def plant(folder: Path) -> None:
    """Files called like packages that are imported at the start, and later, which they must not
    replace."""
    for name in ("statistics", "datasets", "yaml", "torch"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")


# One run from the installed script, as a newcomer does it


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("quickstart")
    plant(folder)
    done = installed(folder, "fit", "--config", QUICKSTART, "--trainer.max_epochs=2", timeout=300)
    assert done.code == 0, done.err
    return folder / "runs/MLPClassifier-LayerNorm/version_0", done


def test_quickstart_leaves_everything_in_one_folder(quickstart) -> None:
    folder, _ = quickstart
    names = {p.name.partition(".out")[0] for p in folder.rglob("*") if p.is_file()}
    assert names == {
        "metrics.csv", "events", "hparams.yaml", "config.yaml", "last.ckpt", "last-previous.ckpt",
        "curves.png", "test_results.json",
    }  # fmt: skip
    assert [p.name for p in folder.parent.parent.iterdir()] == ["MLPClassifier-LayerNorm"]
    assert {p.name for p in folder.parents[2].iterdir() if p.suffix != ".py"} == {"runs"}


def test_quickstart_prints_the_table_and_says_where(quickstart) -> None:
    folder, done = quickstart
    for word in ("metric", "measured", "error", "nll"):
        assert word in done.out
    assert "reported" not in done.out  # no source has a number for these digits
    where = "runs/MLPClassifier-LayerNorm/version_0"
    for line in (
        f"results: {where}/test_results.json",
        f"checkpoint (last): {where}/checkpoints/last.ckpt",
        f"plot: {where}/curves.png",
        f"curves: {where}/metrics.csv",
        f"TensorBoard: tensorboard --logdir {where}",
    ):
        assert line in done.out.splitlines()
    measured = json.loads((folder / "test_results.json").read_text())
    assert measured["data"]["dataset"] == "digits"
    assert measured["preprocessing"] == {"scale": 16, "image_shape": [1, 8, 8]}
    assert measured["command"].startswith("ln-zoo fit --config ")
    assert (measured["seed"], measured["epochs"], measured["steps"]) == (0, 2, 42)


def test_a_progress_bar_and_no_advertisement(quickstart) -> None:
    _, done = quickstart
    assert "Epoch 1/1" in done.out
    assert "train_loss" in done.out
    text = done.out + done.err
    assert "💡" not in text
    assert "litlogger" not in text.lower()
    assert "Warning" not in text
    assert "deprecated" not in text


def test_both_logs_hold_the_same_curves(quickstart) -> None:
    folder, _ = quickstart
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert {"train_loss", "val_nll", "epoch_test_error", "test_error"} <= set(
        events.Tags()["scalars"]
    )
    for name in ("train_loss", "epoch_train_nll", "val_error"):
        in_csv = [(int(r["step"]), float(r[name])) for r in rows if r[name]]
        in_board = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in in_csv] == [step for step, _ in in_board]
        assert [v for _, v in in_board] == pytest.approx([v for _, v in in_csv], rel=1e-6)


def test_configuration_repeats_the_run(quickstart, here: Path) -> None:
    folder, _ = quickstart
    done = run("fit", "--config", folder / "config.yaml", *QUIET, "--trainer.logger.save_dir=again")
    assert done.code == 0, done.err
    assert not (here / "runs").exists()  # every logger went along
    (again,) = here.glob("again/**/last.ckpt")
    first, second = load(folder / "checkpoints/last.ckpt"), load(again)
    assert second["hyper_parameters"] == first["hyper_parameters"]
    assert second["global_step"] == first["global_step"]


# Tables


def test_a_test_of_published_weights_stands_beside_their_card(here: Path) -> None:
    weights = ("test", "--weights=mlp.layernorm-digits", "--data=Digits", *QUIET)
    done = run(*weights)
    assert done.code == 0, done.err
    (row,) = [line for line in done.out.splitlines() if " error " in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["error", "%", "2", "2"]
    (results,) = here.rglob("test_results.json")
    whole = json.loads(results.read_text())
    assert (whole["part"], whole["data"]["test_size"]) == (None, 300)


def test_a_card_of_other_inputs_is_left_out(here: Path) -> None:
    code = "from ln_zoo.data import Digits\n\nclass Coarse(Digits):\n    scale = 8\n"
    (here / "coarse_digits.py").write_text(code)
    arguments = ("--weights=mlp.layernorm-digits", "--data=coarse_digits.Coarse")
    done = script(here, "test", *arguments, *QUIET)
    assert done.code == 0, done.err
    (head,) = [line for line in done.out.splitlines() if "measured" in line]
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == ["metric", "unit", "measured"]
    below = " ".join(done.out.partition("└")[2].split())
    assert "The card's numbers are for other inputs: scale 8 here, 16 there." in below


def test_a_test_of_a_part_says_so(here: Path) -> None:
    part = ("--data.eval_batch_size=20", "--trainer.limit_test_batches=2")
    done = run("test", "--weights=mlp.layernorm-digits", "--data=Digits", *QUIET, *part)
    assert done.code == 0, done.err
    title = " ".join(done.out.partition("┏")[0].split())
    assert title.endswith("on a part of the test set: 2 of 15 batches, 40 examples")
    (results,) = here.rglob("test_results.json")
    measured = json.loads(results.read_text())
    assert measured["part"] == {"batches": 2, "of_batches": 15, "examples": 40}
    assert measured["data"]["test_size"] == 40


def test_validation_prints_a_table_too(here: Path, trained: Path) -> None:
    done = run("validate", f"--ckpt_path={trained}", "--data=Digits", *QUIET)
    assert done.code == 0, done.err
    for word in ("MLPClassifier, LayerNorm", "metric", "measured", "error", "nll"):
        assert word in done.out
    assert not list(here.rglob("test_results.json"))


# Activity by position

CONV = ("--model=ConvClassifier", "--model.channels=[[2], [3]]", "--model.hidden_size=4")


@pytest.mark.parametrize("command", ["test", "validate"])
def test_the_picture_of_activity_is_told(here: Path, command: str) -> None:
    argv = [command, *CONV, *SMALL[2:], *QUIET]
    plain = run(*argv)
    watched = run(*argv, "--trainer.callbacks", "ActivityByPosition")
    assert (plain.code, watched.code) == (0, 0), plain.err + watched.err
    folder = Path("runs/ConvClassifier-LayerNorm/version_1")
    told = [line for line in watched.out.splitlines() if line.startswith("activity: ")]
    assert told == [f"activity: {folder}/activity.png"]
    assert (here / folder / "activity.png").read_bytes().startswith(b"\x89PNG")
    with (here / folder / "activity.csv").open() as file:
        rows = list(csv.DictReader(file))
    # The data's image_shape is the model's: 8 x 8 positions, and 4 x 4 behind a pool.
    assert {row["layer"]: int(row["row"]) for row in rows} == {"network.0": 7, "network.3": 3}
    assert "activity: " not in plain.out
    assert not list(here.glob("**/version_0/activity*"))


# Pictures of a network that draws

DRAWS = (
    "--model=DRAW", "--model.image_size=[28, 28]", "--model.glimpses=3",
    "--model.hidden_size=8", "--model.latent_size=2", "--data=BinarizedDigits",
    "--data.train_size=50", "--data.val_size=20",
)  # fmt: skip


def test_pictures_are_drawn_while_training_and_told_of_by_predict(here: Path) -> None:
    few = ("--trainer.callbacks.rows=2", *QUIET)
    fitted = run("fit", *DRAWS, "--trainer.max_epochs=1", "--trainer.callbacks=DRAWSamples", *few)
    assert fitted.code == 0, fitted.err
    (checkpoint,) = here.glob("**/last.ckpt")
    names = {"samples", "filmstrip", "nearest", "reconstructions", "reading", "kl"}
    of_training = list((checkpoint.parents[1] / "samples").iterdir())
    assert {p.stem.split("-")[-1] for p in of_training} == names
    done = run(
        "predict", f"--ckpt_path={checkpoint}", "--data=BinarizedDigits", *QUIET,
        "--trainer.callbacks=DRAWPictures", *few[:1],
    )  # fmt: skip
    assert done.code == 0, done.err
    (told,) = (line for line in done.out.splitlines() if line.startswith("pictures: "))
    folder, listed = told.removeprefix("pictures: ").split(": ")
    assert set(listed.split(", ")) == {f"{name}.png" for name in names} | {"drawing.gif"}
    for name in listed.split(", "):
        start = b"GIF8" if name.endswith("gif") else b"\x89PNG"
        assert (here / folder / name).read_bytes().startswith(start)


# Folders and versions


def test_equal_commands_give_equal_runs_in_new_folders(here: Path) -> None:
    for _ in range(2):
        fit("--model.norm=BatchNorm")
    runs = here / "runs/MLPClassifier-BatchNorm"
    assert sorted(p.name for p in runs.iterdir()) == ["version_0", "version_1"]
    for folder in runs.iterdir():
        assert (folder / "metrics.csv").is_file()
        assert list(folder.glob("events.*"))
    first, second = (load(runs / f"version_{n}/checkpoints/last.ckpt") for n in (0, 1))
    assert same(first["state_dict"], second["state_dict"])
    assert same(first["optimizer_states"], second["optimizer_states"])
    fit("--model.norm=BatchNorm", "--seed_everything=1")
    assert not same(
        load(runs / "version_2/checkpoints/last.ckpt")["state_dict"], first["state_dict"]
    )


def test_versions_of_loggers_agree_where_one_is_behind(here: Path) -> None:
    fit(
        "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs", "--trainer.logger.name=null"
    )
    fit()
    folder = here / "runs/MLPClassifier-LayerNorm/version_1"
    assert (folder / "metrics.csv").is_file()
    assert list(folder.glob("events.*"))
    assert (folder / "config.yaml").is_file()


def test_options_of_the_logger_are_for_all_loggers(here: Path) -> None:
    fit("--trainer.logger.save_dir=elsewhere", "--trainer.logger.name", "mine")
    folder = here / "elsewhere/mine/version_0"
    assert (folder / "metrics.csv").is_file()
    assert list(folder.glob("events.*"))
    assert (folder / "checkpoints/last.ckpt").is_file()
    assert [p.name for p in here.iterdir()] == ["elsewhere"]
    # Resumed by the same names.
    options = ["--trainer.logger.save_dir=elsewhere", "--trainer.logger.name=mine"]
    fit(*options, "--ckpt_path=last", epochs=2)
    assert load(here / "elsewhere/mine/version_1/checkpoints/last.ckpt")["global_step"] == 10


def test_default_norm_names_the_folder_as_if_given(here: Path) -> None:
    fit()
    fit("--model.norm=LayerNorm")
    assert [p.name for p in (here / "runs").iterdir()] == ["MLPClassifier-LayerNorm"]


def test_two_runs_without_a_logger(here: Path) -> None:
    for _ in range(2):  # the saved configuration is not an obstacle to the second
        fit("--trainer.logger=false")


def test_checkpoints_of_the_users_own_stand_beside_ours(here: Path) -> None:
    (here / "own.yaml").write_text(
        "trainer:\n  callbacks:\n    - class_path: ModelCheckpoint\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        "      init_args: {monitor: val_error, filename: best}\n"
    )
    fit("--config=own.yaml", epochs=2)
    names = {p.name for p in here.glob("runs/**/*.ckpt")}
    assert {"last.ckpt", "last-previous.ckpt", "best.ckpt", "epoch=1-step=10.ckpt"} == names
    assert fit("--config=own.yaml", "--ckpt_path=last", epochs=3).code == 0


def test_no_checkpoints_if_not_wanted(here: Path) -> None:
    done = fit("--trainer.enable_checkpointing=false", "--test_after_fit=true")
    assert not list(here.rglob("*.ckpt"))
    (results,) = here.rglob("test_results.json")
    measured = json.loads(results.read_text())
    assert (measured["checkpoint"], measured["epochs"], measured["steps"]) == (None, 1, 5)
    assert "checkpoint (" not in done.out


def test_fast_dev_run_writes_nothing(here: Path) -> None:
    assert (
        run("fit", *SMALL, *QUIET, "--trainer.fast_dev_run=true", "--test_after_fit=true").code == 0
    )
    assert [p for p in here.rglob("*") if p.is_file()] == []


# Options


def test_print_config(here: Path) -> None:
    done = run(
        "fit", "--config", QUICKSTART, "--config", CONFIGS / "norms/batch.yaml", "--print_config"
    )
    assert done.code == 0
    config = yaml.safe_load(done.out)
    norm = config["model"]["init_args"]["norm"]
    assert norm["class_path"] == "ln_zoo.norms.BatchNorm"
    assert norm["init_args"]["recurrent_gain"] == 0.1
    assert config["seed_everything"] == 0
    (here / "printed.yaml").write_text(done.out)
    assert run("fit", "--config=printed.yaml", *QUIET, "--trainer.fast_dev_run=true").code == 0


def test_environment_variables(here: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    monkeypatch.setenv("LN_ZOO_FIT__TRAINER__MAX_EPOCHS", "2")
    assert run("fit", *SMALL, *QUIET).code == 0
    (last,) = here.rglob("last.ckpt")
    assert load(last)["global_step"] == 10
    monkeypatch.setenv("LN_ZOO_TEST__CKPT_PATH", str(trained))
    done = run("test", "--data=Digits", *QUIET)
    assert (done.code, "untrained" in done.err) == (0, False)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_every_subcommand(command: str) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    for option in ("--model", "--data", "--weights", "--ckpt_path", "--trainer.max_epochs"):
        assert (
            f"  {option} " in done.out or f", {option} " in done.out or f"\n  {option}" in done.out
        )


def test_help_of_a_norm() -> None:
    done = run("fit", *SMALL, "--model.norm.help", "LayerNorm")
    assert done.code == 0
    assert "--model.norm.eps EPS" in done.out or "--norm.eps EPS" in done.out
    # However the lines are broken.
    assert "type: float, default: 1e-05" in " ".join(done.out.split())


@pytest.mark.slow
def test_completion_script_knows_the_norms() -> None:
    done = run("--print_completion=shtab-bash")
    assert done.code == 0
    for word in ("LayerNorm", "BatchNorm", "MLPClassifier", "Digits", "--trainer.max_epochs"):
        assert word in done.out


# A norm of the user's own

MY_NORM = """
from dataclasses import dataclass
import torch
from ln_zoo.norms import Norm

@dataclass(frozen=True)
class MyNorm(Norm):
    eps: float = 1e-5
    def init_params(self, site): site.add_affine(gain=1.0)
    def normalize(self, site, a, step=None):
        return site.affine(a * torch.rsqrt(site.mean(a * a) + self.eps))
"""


def test_a_users_norm_trains_reloads_and_resumes(here: Path) -> None:
    (here / "my_norm.py").write_text(MY_NORM)
    plant(here)
    own = ["--model.norm=my_norm.MyNorm", "--model.norm.eps=1e-3"]
    # As the installed script, which does not look in the current folder by itself.
    done = script(here, "fit", *SMALL, *QUIET, *own, "--trainer.max_epochs=1")
    assert done.code == 0, done.err
    last = here / "runs/MLPClassifier-MyNorm/version_0/checkpoints/last.ckpt"
    hparams = load(last)["hyper_parameters"]
    assert hparams["norm"] == {"class_path": "my_norm.MyNorm", "init_args": {"eps": 1e-3}}
    done = script(here, "test", "--ckpt_path", last, own[0], "--data=Digits", *QUIET)
    assert (done.code, "ignored" in done.err) == (0, False), done.err
    assert "MLPClassifier, MyNorm" in " ".join(done.out.split())
    done = run("fit", *SMALL, *QUIET, *own, "--trainer.max_epochs=2", "--ckpt_path=last")
    assert (done.code, "ignored" in done.err) == (0, False), done.err
    assert (
        load(here / "runs/MLPClassifier-MyNorm/version_2/checkpoints/last.ckpt")["global_step"]
        == 10
    )


# Losses that are no numbers

BAD = """
from ln_zoo.models import MLPClassifier

class Bad(MLPClassifier):
    def __init__(self, what: str = "loss", step: int = 7) -> None:
        super().__init__(64, [8])
        self.what, self.step = what, step
        self.save_hyperparameters()
        self.resolve_hyperparameters(self.network[1].site.norm)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step != self.step:
            return loss
        if self.what == "loss":
            return loss * float("inf")
        # Finite itself, with a gradient that is not.
        return loss + (self.network[1].weight * 0).abs().sum().sqrt()
"""


@pytest.mark.parametrize(
    ("what", "step", "message"),
    [
        ("loss", 7, "the training loss is not finite at step 7 (epoch 1): training stopped, and"),
        ("loss", 5, "the training loss is not finite at step 5 (epoch 1): training stopped, and"),
        # At the last update of an epoch: no loss tells before the checkpoint is written.
        (
            "gradient",
            9,
            "network.1.weight is not finite after step 9 (epoch 1): training stopped, and",
        ),
    ],
)
def test_a_bad_loss_keeps_the_last_good_checkpoint(
    here: Path, what: str, step: int, message: str
) -> None:
    (here / "bad_model.py").write_text(BAD)
    done = run(
        "fit", "--model=bad_model.Bad", f"--model.what={what}", f"--model.step={step}",
        *SMALL[2:], *QUIET, "--trainer.max_epochs=3", "--test_after_fit=true",
    )  # fmt: skip
    assert done.code == 1
    last = here / "runs/Bad/version_0/checkpoints/last.ckpt"
    assert done.err.splitlines()[-1].startswith(
        f"ln-zoo fit: error: {message} the last good checkpoint is "
    )
    assert str(last.relative_to(here)) in done.err
    checkpoint = load(last)
    assert checkpoint["global_step"] == 5
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
    own = "--model=bad_model.Bad"
    assert run("test", own, "--ckpt_path", last, "--data=Digits", *QUIET).code == 0


def test_a_bad_loss_at_the_first_step(here: Path) -> None:
    (here / "bad_model.py").write_text(BAD)
    done = run(
        "fit",
        "--model=bad_model.Bad",
        "--model.step=0",
        *SMALL[2:],
        *QUIET,
        "--trainer.max_epochs=1",
    )
    assert done.code == 1
    assert (
        "not finite at step 0 (epoch 0): training stopped, and no checkpoint was written yet"
        in done.err
    )


# Where the output cannot go


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        (["--trainer.logger.save_dir=taken/runs"], "taken/runs"),
        (["--trainer.logger=false", "--trainer.default_root_dir=/proc/x"], "/proc/x"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=taken/mine"],
            "taken/mine",
        ),
    ],
)
def test_output_where_nothing_can_be_made(here: Path, options: list[str], folder: str) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc, where not even root can make a folder")
    (here / "taken").write_text("not a folder")
    fails("fit", *SMALL, *QUIET, *options, says=[folder])
    assert (here / "taken").read_text() == "not a folder"


def test_a_full_disk(here: Path) -> None:
    (here / "full.py").write_text(
        "import shutil\nfrom collections import namedtuple\nfrom ln_zoo.cli import main\n"
        "usage = namedtuple('usage', 'total used free')(10**9, 10**9 - 9000, 9000)\n"
        "shutil.disk_usage = lambda path: usage\n"
    )
    arguments = [*SMALL, *QUIET]
    done = python(
        here,
        f"import full\nprint('fit', main(['fit', *{arguments}]))\n"
        f"print('test', main(['test', *{arguments}]))",
    )
    # 64 x 8 + 8 + 8 x 10 + 10 parameters and 8 gains of 4 bytes, with Adam's moments, thrice.
    needed = 3 * 3 * 4 * (64 * 8 + 8 + 8 + 8 * 10 + 10) / 1e6
    assert (
        f"the output folder runs has 0.0 MB left, and checkpoints need {needed:.1f} MB" in done.err
    )
    assert not list(here.rglob("*.ckpt"))
    assert "fit 2" in done.out
    assert "test 0" in done.out  # a test writes no checkpoints


# predict


def test_predictions_are_the_models_own(trained: Path, here: Path) -> None:
    done = run("predict", "--ckpt_path", trained, "--data=Digits", *QUIET)
    assert done.code == 0, done.err
    path = here / "runs/MLPClassifier-LayerNorm/version_0/predictions.jsonl"
    assert f"predictions: {path.relative_to(here)}" in done.out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(300))
    model = MLPClassifier.load_from_checkpoint(trained).eval()
    data = Digits()
    data.setup()
    images, labels = zip(*data.test_dataloader(), strict=True)
    with torch.no_grad():
        shares = torch.cat([model(part).double().softmax(-1) for part in images])
    assert [line["prediction"] for line in lines] == shares.argmax(-1).tolist()
    assert [line["label"] for line in lines] == torch.cat(labels).tolist()
    assert [line["probability"] for line in lines] == pytest.approx(shares.max(-1)[0].tolist())


def test_predictions_where_the_user_wants_them(trained: Path, here: Path) -> None:
    done = run(
        "predict", "--ckpt_path", trained, "--data=Digits", *QUIET,
        "--trainer.callbacks+=PredictionWriter", "--trainer.callbacks.path=out/digits.jsonl",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len((here / "out/digits.jsonl").read_text().splitlines()) == 300
    assert not list(here.rglob("predictions.jsonl"))
