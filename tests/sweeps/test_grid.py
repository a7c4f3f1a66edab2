"""The grid of a sweep: options, names, commands, and which grids may go on in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_runs import refuses

from ln_zoo.cli.arguments import Arguments
from ln_zoo.sweeps.grid import Grid, contents_of, folder_name
from ln_zoo.sweeps.manifest import check_extends, read_grid, write_grid
from ln_zoo.sweeps.options import parse_norms, parse_seeds, parse_settings

GRID = Grid(
    configs=["base.yaml"],
    norms=["norms/layer.yaml", "norms/none.yaml"],
    seeds=[0, 1],
    settings={"model.lr": ["2e-4", "1e-3"]},
    options=["--trainer.max_epochs=2"],
)


def test_runs_are_the_product_seed_by_seed() -> None:
    runs = GRID.runs()
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert GRID.labels() == [
        "layer, model.lr=2e-4", "layer, model.lr=1e-3", "none, model.lr=2e-4",
        "none, model.lr=1e-3",
    ]  # fmt: skip
    assert runs[5].name == "layer-model.lr-1e-3/seed_1"
    assert GRID.arguments(runs[5]) == [
        "--config=base.yaml", "--config=norms/layer.yaml", "--trainer.max_epochs=2",
        "--model.lr=1e-3", "--seed_everything=1", "--data.seed=1",
    ]  # fmt: skip
    assert "--data.seed=1" not in replace(GRID, data_seed=False).arguments(runs[5])


def test_a_class_comes_with_all_its_fields() -> None:
    """Else those of the configuration's own norm would stay."""
    run = replace(GRID, norms=["BatchNorm"]).runs()[0]
    assert run.label.startswith("BatchNorm, ")
    (argument,) = (a for a in GRID.arguments(run) if "class_path" in a)
    assert '"momentum": 0.1' in argument


def test_folders_differ_where_labels_do() -> None:
    values = ["[8, 8]", "[8,8]", "[8_8]", "a/b", "a_b", "x=1", "x-1", "..", "é"]
    values += ["x" * 300, "x" * 301]
    names = {folder_name("layer", {"a": value}) for value in values}
    assert len(names) == len(values)
    assert all(not {"/", "="} & set(name) and len(name) <= 120 for name in names)


@pytest.mark.parametrize("text", ["0", "-1", "a", "1,-2", "1,1", "", ",", "1.5"])
def test_wrong_seeds(text: str) -> None:
    refuses("--seeds", parse_seeds, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model.lr"], "takes OPTION=VALUE"),
        (["=1"], "takes OPTION=VALUE"),
        (["model.lr="], "has no value: the grid is empty"),
        (["model.lr=,"], "has no value: the grid is empty"),
        (["model.lr=1,1"], "has 1 twice"),
        (["model.lr=1", "--model.lr=2"], "is given twice"),
        (["model.hidden_sizes=[8,16"], "unmatched"),
        (["seed_everything=1,2"], "is set by the sweep .--seeds."),
        (["trainer.logger.name=a"], "is set by the sweep .--out."),
        (["config=a"], "is set by the sweep .--config."),
    ],
)
def test_wrong_settings(given: list[str], message: str) -> None:
    refuses(message, parse_settings, given)


def test_norms_are_found_beside_the_configuration(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "configs/norms").mkdir(parents=True)
    (tmp_path / "configs/mlp").mkdir()
    (tmp_path / "configs/norms/layer.yaml").write_text("model: {}\n")
    config = str(tmp_path / "configs/mlp/paper.yaml")
    file = tmp_path / "configs/norms/layer.yaml"
    assert [Path(p).resolve() for p in parse_norms("layer", [config])] == [file]
    assert parse_norms(f"{file},my_norm.MyNorm,RMSNorm", []) == [
        str(file), "my_norm.MyNorm", "RMSNorm",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert parse_norms("layer", []) == ["configs/norms/layer.yaml"]
    for text, message in (
        ("layr", "did you mean 'layer'"),
        (" , ", "the grid is empty"),
        ("no.yaml", "there is no file no.yaml"),
        (f"layer,{file}", "has layer twice"),
    ):
        refuses(message, parse_norms, text, [])


def test_a_folder_keeps_its_grid(tmp_path: Path) -> None:
    assert read_grid(tmp_path) is None
    write_grid(GRID, tmp_path)
    assert read_grid(tmp_path) == GRID
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.json"]
    for content in ("", "[]", "{}", '{"format_version": 1, "configs": []}'):
        (tmp_path / "sweep.json").write_text(content)
        refuses("choose another --out", read_grid, tmp_path)
    (tmp_path / "sweep.json").write_text('{"format_version": 3}')
    refuses("newer version", read_grid, tmp_path)


def test_only_a_larger_grid_goes_on_in_a_folder(tmp_path: Path) -> None:
    base = str(tmp_path / "base.yaml")
    Path(base).write_text("a: 1\n")
    old = replace(GRID, contents=contents_of([base], []))
    more = {"model.lr": ["1e-3", "5e-4", "2e-4"]}
    larger = replace(old, norms=[*old.norms, "RMSNorm"], seeds=[1, 0, 2], settings=more)
    check_extends(larger, old, tmp_path)
    Path(base).write_text("a: 2\n")
    changed = contents_of([base], [])
    for new, message in (
        (replace(old, seeds=[0]), "seeds 1 only there"),
        (replace(old, norms=["norms/layer.yaml"]), "norms norms/none.yaml only there"),
        (replace(old, settings={"model.lr": ["1e-3"]}), "--set model.lr 2e-4 only there"),
        (replace(old, settings={}), "--set of model.lr there, of nothing here"),
        (replace(old, options=[]), "options --trainer.max_epochs=2 there, nothing here"),
        (replace(old, threads=3), "threads 0 there, 3 here"),
        (replace(old, test="best"), "test last there, best here"),
        (replace(old, contents=changed), "base.yaml has changed since"),
    ):
        refuses(message, check_extends, new, old, tmp_path)


def test_a_sweep_needs_no_checkout(in_tmp: Path) -> None:
    norms = parse_norms("layer,rms,Identity", ["quickstart"])
    grid = replace(GRID, configs=["quickstart"], norms=norms, settings={})
    assert grid.labels() == ["layer", "rms", "none"]
    assert len(contents_of(grid.configs, norms)) == 4
    given = Arguments(["fit", *grid.arguments(grid.runs()[1])])
    assert given.last("data") == "ln_zoo.data.Digits"


def test_a_norm_by_callback() -> None:
    layer, none = (
        Arguments(["fit", *replace(GRID, configs=[], norms=[norm], callback=True).arguments(run)])
        for norm in ("norms/layer.yaml", "Identity")
        for run in replace(GRID, norms=[norm]).runs()[:1]
    )
    for given, norm in ((layer, "LayerNorm"), (none, "Identity")):
        assert given.last("trainer.callbacks.norm") == f"ln_zoo.norms.{norm}"
        assert not given.sets("model.norm")


def test_a_grid_holds_what_its_runs_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are here and unchanged are named; the content of others is given."""
    monkeypatch.chdir(tmp_path)
    names = ["base.yaml", "norms/layer.yaml", "norms/none.yaml"]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"# {name}\n")
    contents = contents_of(names[:1], [*names[1:], "LayerNorm"])
    write_grid(replace(GRID, contents=contents), tmp_path)
    grid = read_grid(tmp_path)
    assert grid is not None
    assert grid.arguments(grid.runs()[0])[:2] == [f"--config={name}" for name in names[:2]]
    Path(names[0]).unlink()
    Path(names[1]).write_text("model: {}\n")
    given = grid.arguments(grid.runs()[0])
    assert given[:2] == [f"--config=# {name}\n" for name in names[:2]]
    assert grid.changed() == [names[1]]
    # A class keeps the defaults that it had.
    whole = replace(
        grid, contents=grid.contents | {"LayerNorm": "{model: {}}"}, norms=["LayerNorm"]
    )
    assert whole.arguments(whole.runs()[0])[1] == "--config={model: {}}"


def test_folders_of_version_1_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("a: 1\n")
    digest = hashlib.sha256(b"a: 1\n").hexdigest()
    fields = {"configs": ["base.yaml"], "norms": ["n.yaml"], "seeds": [0], "settings": {}}
    fields |= {"options": [], "test": "last", "threads": 1, "data_seed": True}
    old = {"format_version": 1, **fields, "digests": {"base.yaml": digest}}
    Path("sweep.json").write_text(json.dumps(old))
    grid = read_grid(tmp_path)
    assert grid is not None
    assert grid.arguments(grid.runs()[0])[0] == "--config=base.yaml"
    assert grid.changed() == []
    Path("base.yaml").write_text("a: 2\n")
    assert grid.changed() == ["base.yaml"]


def test_modules_of_the_user_are_found_beside_the_sweep(tmp_path: Path, monkeypatch) -> None:
    """First at their place relative to the sweep, as in a copy of both, then at their own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for place in ("own", "copy"):
        (tmp_path / place / "sweeps/s").mkdir(parents=True)
        (tmp_path / place / "my_norm.py").touch()
    grid = replace(GRID, modules={"my_norm": ["../..", str(tmp_path / "own")]})
    grid.find_modules(tmp_path / "copy/sweeps/s")
    assert sys.path[-1] == str(tmp_path / "copy")
    grid.find_modules(tmp_path)
    assert sys.path[-1] == str(tmp_path / "own")


def test_relative_paths_are_those_of_the_first_folder(tmp_path: Path, monkeypatch) -> None:
    """First at their place relative to the sweep, then at their own, then where the user is."""
    names = ("own", "copy", "alone", "here")
    own, copy, alone, here = places = [tmp_path / name / "project" for name in names]
    for place in places:
        (place / "sweeps/s").mkdir(parents=True)
        (place / "a.txt").touch()
    (alone / "a.txt").unlink()
    grid = replace(GRID, paths=["a.txt", "removed.txt"], folders=["../..", str(own)])
    monkeypatch.chdir(here)
    monkeypatch.setenv("LN_ZOO_DATA", "data")

    def entered(out: Path) -> Path:
        with grid.in_own_folder(out) as found:
            assert found.resolve() == (here / out).resolve()
            return Path.cwd()

    assert entered(Path("../../copy/project/sweeps/s")) == copy
    assert os.environ["LN_ZOO_DATA"] == str(here / "data")
    assert entered(alone / "sweeps/s") == own
    shutil.rmtree(own)
    assert entered(alone / "sweeps/s") == here
    (here / "a.txt").unlink()
    assert entered(Path("../../alone/project/sweeps/s")) == here
    grid = replace(grid, paths=[], folders=[])  # of an earlier version
    assert entered(copy / "sweeps/s") == here
    assert Path.cwd() == here
