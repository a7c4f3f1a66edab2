"""What a run leaves behind, what it says, and where it refuses to begin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import (
    CONFIGS,
    QUIET,
    SMALL,
    Done,
    Patch,
    cli,
    fit,
    installed,
    last,
    load,
    python,
    results,
    same,
    succeed,
)
from data_support import ready
from refusals import refuses

from ln_zoo.cli import threads
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier

QUICKSTART = CONFIGS / "quickstart.yaml"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("quickstart")
    argv = ("fit", "--config", QUICKSTART, "--trainer.max_epochs=2")
    done = installed(folder, *argv, OMP_DISPLAY_ENV="verbose", OMP_NUM_THREADS="2")
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


def test_quickstart_prints_the_table_and_the_paths(quickstart) -> None:
    folder, done = quickstart
    for word in ("metric", "measured", "error", "nll", "Epoch 1/1", "train_loss"):
        assert word in done.out
    assert "reported" not in done.out  # no source has a number for these digits
    for unwanted in ("💡", "litlogger", "Warning", "deprecated"):
        assert unwanted not in done.out + done.err
    where = "runs/MLPClassifier-LayerNorm/version_0"
    assert {
        f"results: {where}/test_results.json", f"checkpoint (last): {where}/checkpoints/last.ckpt",
        f"plot: {where}/curves.png", f"curves: {where}/metrics.csv",
        f"TensorBoard: tensorboard --logdir {where}",
    } <= set(done.out.splitlines())  # fmt: skip
    measured = json.loads((folder / "test_results.json").read_text())
    assert measured["data"]["dataset"] == "digits"
    assert measured["preprocessing"] == {"scale": 16, "image_shape": [1, 8, 8]}
    assert measured["command"].startswith("ln-zoo fit --config ")
    assert (measured["seed"], measured["epochs"], measured["steps"]) == (0, 2, 42)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch does not use libgomp")
def test_libgomp_sleeps_early(quickstart) -> None:
    assert f"GOMP_SPINCOUNT = '{threads._SPINS}'" in quickstart[1].err


def test_configuration_repeats_the_run(quickstart, here: Path) -> None:
    folder, _ = quickstart
    succeed("fit", "--config", folder / "config.yaml", *QUIET, "--trainer.logger.save_dir=again")
    assert not (here / "runs").exists()  # every logger went along
    (again,) = here.glob("again/**/last.ckpt")
    first, second = load(folder / "checkpoints/last.ckpt"), load(again)
    for key in ("hyper_parameters", "global_step"):
        assert second[key] == first[key]


def test_tables_of_published_weights(here: Path) -> None:
    """The card's numbers appear in the table, unless they are for other inputs or a part."""

    def tested(*argv: str) -> tuple[str, dict]:
        done = succeed("test", "--weights=mlp.layernorm-digits", *argv, *QUIET)
        newest = max(here.rglob("test_results.json"), key=lambda path: path.parent.name)
        return done.out, json.loads(newest.read_text())

    out, whole = tested("--data=Digits")
    (row,) = [line for line in out.splitlines() if " error " in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["error", "%", "2", "2"]
    assert (whole["part"], whole["data"]["test_size"]) == (None, 300)

    part = ("--data.eval_batch_size=20", "--trainer.limit_test_batches=2")
    out, measured = tested("--data=Digits", *part)
    title = " ".join(out.partition("┏")[0].split())
    assert title.endswith("2 of 15 batches, 40 examples")
    assert measured["part"] == {"batches": 2, "of_batches": 15, "examples": 40}
    assert measured["data"]["test_size"] == 40

    code = "from ln_zoo.data import Digits\n\nclass Coarse(Digits):\n    scale = 8\n"
    (here / "coarse_digits.py").write_text(code)
    out, _ = tested("--data=coarse_digits.Coarse")
    (head,) = [line for line in out.splitlines() if "measured" in line]
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == ["metric", "unit", "measured"]
    assert "scale 8 here, 16 there" in " ".join(out.partition("└")[2].split())


def test_equal_commands_give_equal_runs_in_new_folders(here: Path) -> None:
    fit()
    fit("--model.norm=LayerNorm")  # the default
    fit("--seed_everything=1")
    first, second, other = (load(last(version)) for version in range(3))
    assert same(first["state_dict"], second["state_dict"])
    assert same(first["optimizer_states"], second["optimizer_states"])
    assert not same(other["state_dict"], first["state_dict"])


def test_options_of_the_logger_are_for_all_loggers(here: Path) -> None:
    options = ("--trainer.logger.save_dir=elsewhere", "--trainer.logger.name", "mine")
    fit(*options)
    names = {path.name.partition(".out")[0] for path in here.glob("elsewhere/mine/version_0/*")}
    assert {"metrics.csv", "events", "checkpoints"} <= names
    assert [p.name for p in here.iterdir()] == ["elsewhere"]
    # Resumed by the same names.
    fit(*options, "--ckpt_path=last", epochs=2)
    assert load(last(1, "mine", "elsewhere"))["global_step"] == 10


def test_checkpoints_of_the_users_own_stand_beside_ours(here: Path) -> None:
    (here / "own.yaml").write_text(
        "trainer:\n  callbacks:\n    - class_path: ModelCheckpoint\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
        "      init_args: {monitor: val_error, filename: best}\n"
    )
    fit("--config=own.yaml", epochs=2)
    names = {p.name for p in here.glob("runs/**/*.ckpt")}
    assert {"last.ckpt", "last-previous.ckpt", "best.ckpt", "epoch=1-step=10.ckpt"} == names
    fit("--config=own.yaml", "--ckpt_path=last", epochs=3)


def test_no_checkpoints_if_not_wanted(here: Path) -> None:
    done = fit("--trainer.enable_checkpointing=false", "--test_after_fit=true")
    assert not list(here.rglob("*.ckpt"))
    measured = results(here)
    assert (measured["checkpoint"], measured["epochs"], measured["steps"]) == (None, 1, 5)
    assert "checkpoint (" not in done.out


def test_fast_dev_run_writes_nothing(here: Path) -> None:
    fit("--trainer.fast_dev_run=true", "--test_after_fit=true")
    assert [p for p in here.rglob("*") if p.is_file()] == []


def test_environment_variables(here: Path, monkeypatch: Patch, trained: Path) -> None:
    monkeypatch.setenv("LN_ZOO_FIT__TRAINER__MAX_EPOCHS", "2")
    succeed("fit", *SMALL, *QUIET)
    assert load(last())["global_step"] == 10
    monkeypatch.setenv("LN_ZOO_TEST__CKPT_PATH", str(trained))
    assert "untrained" not in succeed("test", "--data=Digits", *QUIET).err


def test_completion_of_all_commands(here: Path) -> None:
    """By the script itself, in bash."""
    done = succeed("--print_completion=shtab-bash")
    assert len(done.out) < 4 << 20
    (here / "completion.bash").write_text(done.out)
    expected = {
        "ln-zoo eval": {"evaluate-sentences"},
        "ln-zoo analyze inv": {"invariance"},
        "ln-zoo analyze gradient_flow --data p": {"pixels", "permuted"},
        "ln-zoo sweep --max_t": {"--max_time"},
        "ln-zoo fit --weig": {"--weights", "--weights_only"},
    }
    code = "source completion.bash\nf=$(complete -p ln-zoo | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
    for line in expected:
        code += (
            f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1))\n"
            'COMPREPLY=(); $f ln-zoo "${COMP_WORDS[-1]}"; echo "${COMPREPLY[@]}"\n'
        )
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    offered = [set(line.split()) for line in found.stdout.splitlines()]
    assert dict(zip(expected, offered, strict=True)) == expected


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ("logger.save_dir=taken/runs", "taken/runs"),
        ("logger=false default_root_dir=/proc/x", "/proc/x"),
        ("callbacks+=ModelCheckpoint callbacks.dirpath=taken/mine", "taken/mine"),
    ],
)
def test_output_where_nothing_can_be_made(here: Path, options: str, folder: str) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc, where not even root can make a folder")
    (here / "taken").write_text("not a folder")
    given = (f"--trainer.{option}" for option in options.split())
    refuses([folder], cli, "fit", *SMALL, *QUIET, *given)
    assert (here / "taken").read_text() == "not a folder"


def test_a_full_disk(here: Path) -> None:
    code = (
        "import shutil\nfrom collections import namedtuple\n"
        "usage = namedtuple('usage', 'total used free')(10**9, 10**9 - 9000, 9000)\n"
        "shutil.disk_usage = lambda path: usage\n"
    )
    code += "".join(f"print({c!r}, main([{c!r}, *{[*SMALL, *QUIET]}]))\n" for c in ("fit", "test"))
    done = python(here, code)
    # 64 x 8 + 8 + 8 x 10 + 10 parameters and 8 gains of 4 bytes, with Adam's moments, thrice.
    needed = 3 * 3 * 4 * (64 * 8 + 8 + 8 + 8 * 10 + 10) / 1e6
    assert "folder runs has 0.0 MB" in done.err
    assert f"{needed:.1f} MB" in done.err
    assert not list(here.rglob("*.ckpt"))
    assert "fit 2" in done.out
    assert "test 0" in done.out  # a test writes no checkpoints


def test_predictions_are_the_models_own(trained: Path, here: Path) -> None:
    done = succeed("predict", "--ckpt_path", trained, "--data=Digits", *QUIET)
    path = here / "runs/MLPClassifier-LayerNorm/version_0/predictions.jsonl"
    assert f"predictions: {path.relative_to(here)}" in done.out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(300))
    model = MLPClassifier.load_from_checkpoint(trained).eval()
    images, labels = zip(*ready(Digits()).test_dataloader(), strict=True)
    with torch.no_grad():
        shares = torch.cat([model(part).double().softmax(-1) for part in images])
    assert [line["prediction"] for line in lines] == shares.argmax(-1).tolist()
    assert [line["label"] for line in lines] == torch.cat(labels).tolist()
    assert [line["probability"] for line in lines] == pytest.approx(shares.max(-1)[0].tolist())
